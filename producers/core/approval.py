"""Approval: a run whose trigger has `require_approval` waits until a person approves it.

The approval is appended in the same write as the request of the run's commit, and before it. So
no code of the commit runs before the approval.
"""

from infra.spine.ports.event_log import Cursor, EventStore
from producers.core.control import Control
from producers.core.lookup import Lookup
from producers.core.submit import commit_request
from producers.core.workspaces import Workspaces
from schemas.errors import Conflict
from schemas.events import Event, RunApproved
from schemas.ids import HEADRACE, derive_id


class Approvals:
    """Approves runs."""

    def __init__(
        self, log: EventStore, lookup: Lookup, *, workspaces: Workspaces, control: Control
    ) -> None:
        self._log = log
        self._lookup = lookup
        self._workspaces = workspaces
        self._control = control

    async def approve(self, ref: str) -> tuple[str, Cursor]:
        """Approve a run. Returns its id and the cursor of the approval. Approving again changes nothing.
        Raises NotFound, and Conflict when the run does not wait for approval."""
        request = await self._lookup.run(ref)
        run, name = request.run, request.run_name
        if not request.needs_approval:
            raise Conflict(f"run {name} does not wait for approval; it starts by itself")
        if await self._log.read(run, after=Cursor(), limit=1, types=[RunApproved.type]):
            return run, Cursor()
        if (ending := await self._control.ending(run)) is not None:
            raise Conflict(f"run {name} is {ending}, so it cannot be approved; push again")
        events: list[Event] = [RunApproved(run=run)]
        if request.workspace is not None:
            workspace = await self._workspaces.find_workspace(request.workspace)
            events.append(commit_request(request, workspace))
        recorded = await self._log.append(events, cause=derive_id(HEADRACE, f"approve/{run}"))
        return run, recorded[-1].cursor
