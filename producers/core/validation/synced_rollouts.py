"""The rollouts that sync found in a workspace, of all branches or of one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from infra.readmodel.registry import Registry
from infra.spine.ports.event_log import Cursor, EventStore, Recorded
from producers.core.connecting import CheckRepository
from producers.core.workspaces import Workspace
from schemas.events import CommitRequested, WorkspaceSynced
from schemas.specs import DiscoveredRollout, Entrypoint

PAGE = 1000
TELLING = (CommitRequested.type, WorkspaceSynced.type)


@dataclass(frozen=True, slots=True)
class SyncedRollout:
    """A rollout, the newest commit that it was found in, and the times when that commit was examined
    and when the rollout was found first."""

    found: DiscoveredRollout
    commit: str
    synced_at: datetime
    created_at: datetime

    @property
    def name(self) -> str:
        return self.found.entrypoint.rollout


class SyncedRollouts:
    """Finds the rollouts of workspaces. `check` asks a repository for its default branch."""

    def __init__(self, log: EventStore, registry: Registry, check: CheckRepository) -> None:
        self._log = log
        self._registry = registry
        self._check = check

    async def find(self, workspace: Workspace, branch: str | None = None) -> list[SyncedRollout]:
        """The rollouts of a workspace, by name and path. With `branch`, those of commits that were
        fetched for this branch; one that was never fetched has none. Without it, those of the default
        branch, which the workspace itself shows. Raises RepositoryAway when the repository has to say
        which branch that is, and does not answer."""
        found: list[Recorded] = []
        after = Cursor()
        types = list(TELLING)
        while page := await self._log.read(workspace.id, after=after, limit=PAGE, types=types):
            found += page
            after = page[-1].cursor
        of_branch = rollouts_in(found, branch=branch)
        if branch is None or of_branch or branch != await self._default_branch(workspace):
            return of_branch
        return rollouts_in(found)

    async def _default_branch(self, workspace: Workspace) -> str:
        """A connected repository has told its default branch. Another one is asked."""
        known = await self._registry.workspace(workspace.id)
        if known is not None and known["default_branch"]:
            return known["default_branch"]
        return await self._check(workspace.url, None)


def rollouts_in(events: Iterable[Recorded], *, branch: str | None = None) -> list[SyncedRollout]:
    """The rollouts that the events of a workspace tell of, as `SyncedRollouts.find` returns them."""
    requests: dict[UUID, CommitRequested] = {}
    known: dict[Entrypoint, SyncedRollout] = {}
    for recorded in events:
        event = recorded.event
        if isinstance(event, CommitRequested):
            requests[recorded.id] = event
        elif isinstance(event, WorkspaceSynced):
            request = requests.get(event.request)
            if request is not None and _is_of(request, branch):
                found = _found_in(event, recorded.time, known)
                # A request for all rollouts also says which ones are gone.
                known = found if not request.entrypoints else {**known, **found}
    return [
        known[entrypoint] for entrypoint in sorted(known, key=lambda one: (one.rollout, one.path))
    ]


def _is_of(request: CommitRequested, branch: str | None) -> bool:
    if branch is None:
        return request.requester is None
    ref = request.commit.ref
    return request.commit.branch == branch or ref == f"refs/heads/{branch}"


def _found_in(
    event: WorkspaceSynced, at: datetime, known: dict[Entrypoint, SyncedRollout]
) -> dict[Entrypoint, SyncedRollout]:
    found = {}
    for one in event.rollouts:
        former = known.get(one.entrypoint)
        new = SyncedRollout(one, event.commit, at, at)
        found[one.entrypoint] = (
            new if former is None else replace(new, created_at=former.created_at)
        )
    return found
