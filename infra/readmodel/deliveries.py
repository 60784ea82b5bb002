"""The queries about what arrived about a repository, and what it led to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypedDict, cast

from infra.readmodel.runs import PageRange, escape_like
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries

SQL = queries("infra/readmodel/read_model.sql")


class DeliveryRow(TypedDict):
    """A delivery of a forge (`kind` push or ping), or a move of a ref that no delivery told (`found`).
    `number` is that of the move that it led to. `unlisted` means that the repository was not asked
    since then. `runs` is the JSON text of the runs that followed."""

    at: datetime
    kind: str
    forge: str | None
    delivery: str | None
    ref: str | None
    before: str | None
    after: str | None
    forced: bool
    pusher: str | None
    number: int | None
    examined: bool
    reason: str | None
    error: str | None
    unlisted: bool
    refs_error: str | None
    runs: str


KINDS = ("push", "ping", "found")


@dataclass(frozen=True, slots=True)
class DeliveryFilter:
    """A selection of deliveries: of a kind (of `KINDS`), and whose ref contains a text."""

    kind: str | None = None
    ref: str | None = None


EVERY = DeliveryFilter()


class TriggerRow(TypedDict):
    """A trigger (the number of its table, and its config) that pushes matched: how often, how many runs
    were submitted, and the last such push with what became of it."""

    config: str
    trigger: int
    matched: int
    submitted: int
    ref: str
    after: str | None
    at: datetime
    outcome: str
    detail: str | None
    run: str
    run_name: str | None
    run_status: str | None
    commit_state: str | None
    commit_text: str | None


@dataclass(frozen=True, slots=True)
class KnownRefs:
    """The digest of a repository's refs as sync listed them last, or why they could not be listed."""

    digest: str | None
    error: str | None


class Deliveries:
    """Queries over deliveries, and over the refs that sync knows."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def page(
        self, workspace: str, page: PageRange, chosen: DeliveryFilter = EVERY
    ) -> tuple[list[DeliveryRow], int]:
        """A page of what arrived for a workspace (its id), the newest first, and how much there is in
        all."""
        rows = await self._pool.fetch(
            SQL["page_of_deliveries"],
            workspace,
            page.limit,
            page.offset,
            chosen.kind,
            f"%{escape_like(chosen.ref)}%" if chosen.ref else None,
        )
        total = int(rows[0]["total"]) if rows else 0
        names = DeliveryRow.__annotations__
        found = [{name: row[name] for name in names} for row in rows]
        return [cast(DeliveryRow, each) for each in found], total

    async def triggers(self, workspace: str) -> list[TriggerRow]:
        """The triggers that the newest 1,000 pushes to a workspace (its id) matched, the last matched
        first, at most 50."""
        rows = await self._pool.fetch(SQL["triggers"], workspace)
        return [cast(TriggerRow, dict(row)) for row in rows]

    async def known_refs(self, workspaces: Sequence[str]) -> Mapping[str, KnownRefs]:
        """The last listing of each of these workspaces (their ids)."""
        rows = await self._pool.fetch(SQL["refs_digests"], list(workspaces))
        return {row["workspace"]: KnownRefs(row["digest"], row["error"]) for row in rows}
