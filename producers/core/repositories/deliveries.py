"""The deliveries about a workspace's repository, and what each led to, or why to nothing."""

import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from infra.readmodel.deliveries import EVERY, Deliveries, DeliveryFilter, DeliveryRow
from infra.readmodel.runs import PageRange
from infra.spine.ports.event_log import EventStore, Recorded
from schemas.events import RefsCheckRequested
from schemas.ids import WorkspaceId

NOT_LISTED = "waits until the repository answers which refs it has"
NOT_MOVED = (
    "no run: the ref was at this commit already, or had moved on when the repository was asked"
)


@dataclass(frozen=True, slots=True)
class ShownDelivery:
    """A delivery and the runs that followed. `result` is one line: what it led to, or why not."""

    row: DeliveryRow
    runs: tuple[dict[str, Any], ...]
    result: str


async def page_of_deliveries(
    table: Deliveries, workspace: str, page: PageRange, chosen: DeliveryFilter = EVERY
) -> tuple[list[ShownDelivery], int]:
    """A page of the deliveries of a workspace (its id), the newest first, and how many there are."""
    rows, total = await table.page(workspace, page, chosen)
    found = []
    for row in rows:
        runs = tuple(json.loads(row["runs"]))
        found.append(ShownDelivery(row, runs, describe(row, runs)))
    return found, total


def describe(row: DeliveryRow, runs: tuple[dict[str, Any], ...]) -> str:
    """One line that says what a delivery led to, or why it led to nothing."""
    if row["kind"] == "ping":
        return "the webhook works"
    if row["error"]:
        return f"no run: {row['error']}"
    if runs:
        return "; ".join(map(_describe_run, runs))
    if row["number"] is None:
        if row["unlisted"]:
            return NOT_LISTED
        return f"no run: {row['refs_error']}" if row["refs_error"] else NOT_MOVED
    if row["after"] is None:
        return "no run: the ref was deleted"
    if row["reason"]:
        return f"no run: {row['reason']}"
    return "no run: no trigger matches" if row["examined"] else "its commit is being examined"


def _describe_run(run: dict[str, Any]) -> str:
    name = run["run_name"] or run["config"]
    if run["outcome"] == "submitted":
        return f"run {name}: {run['commit_text'] or run['status'] or 'pending'}"
    detail = f": {run['detail']}" if run["detail"] else ""
    return f"{name} {run['outcome']}{detail}"


async def request_refs_check(log: EventStore, workspace: WorkspaceId, *, cause: UUID) -> Recorded:
    """Ask sync to list the refs of a repository now. Returns the request as recorded."""
    request = RefsCheckRequested(workspace=workspace, reason="manual")
    [recorded] = await log.append([request], cause=cause)
    return recorded
