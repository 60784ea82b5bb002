"""Whether the rollout that a TOML names is in the commit that will run, as far as that is known.

A commit that was looked into before, and that is named by its hash, cannot have changed: a rollout that
it lacks is refused. A branch may have moved on: what its workspace lacked is only a warning.
"""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from uuid import UUID

from infra.ports.event_log import EventStore, Recorded
from schemas.config import Experiment
from schemas.errors import InvalidConfig, Issue
from schemas.events import RepositoryPushed, WorkspaceSynced
from schemas.ids import workspace_stream
from schemas.specs import DiscoveredRollout, Entrypoint

KEY = "experiment.rollout"
MAIN = "main.py"


@dataclass(frozen=True, slots=True)
class Seen:
    """A commit that was looked into. `whole`: all its rollouts were, each at its main.py."""

    commit: str
    rollouts: tuple[DiscoveredRollout, ...]
    whole: bool

    def find(self, entrypoint: Entrypoint) -> DiscoveredRollout | None:
        return next((r for r in self.rollouts if r.entrypoint == entrypoint), None)


async def check_rollout(log: EventStore, workspace: str, experiment: Experiment) -> tuple[str, ...]:
    """Warnings. Raises InvalidConfig when the commit that is named cannot run this rollout."""
    wanted = Entrypoint(rollout=experiment.rollout or "", path=experiment.entrypoint or MAIN)
    stream = workspace_stream(workspace)
    seen = tuple(_seen((await log.load({stream: 0}))[stream]))
    if experiment.commit_sha is not None:
        for one in seen:
            issue = _issue(one, wanted) if one.commit.startswith(experiment.commit_sha) else None
            if issue is not None:
                raise InvalidConfig(f"{issue.key} {issue.message}", issues=(issue,))
        return ()
    newest = next((one for one in reversed(seen) if one.whole), None)
    if newest is None or any(one.find(wanted) for one in seen):
        return ()
    issue = _issue(newest, wanted)
    if issue is None:
        return ()
    return (f"{issue.key} {issue.message}; the run needs a newer commit that has it",)


def _seen(events: Iterable[Recorded]) -> Iterator[Seen]:
    """Every commit of a workspace's stream that was synced, oldest first."""
    whole: dict[UUID, bool] = {}
    for recorded in events:
        event = recorded.event
        if isinstance(event, RepositoryPushed):
            whole[recorded.id] = not event.entrypoints
        elif isinstance(event, WorkspaceSynced):
            yield Seen(
                event.commit, event.rollouts, whole=whole.get(event.push, event.requester is None)
            )


def _issue(seen: Seen, wanted: Entrypoint) -> Issue | None:
    """Why this commit cannot run the entry point, as far as is known."""
    found = seen.find(wanted)
    if found is not None:
        return Issue(KEY, f"cannot be loaded: {found.error}") if found.error else None
    if not seen.whole or wanted.path != MAIN:
        return None
    names = [rollout.entrypoint.rollout for rollout in seen.rollouts]
    close = difflib.get_close_matches(wanted.rollout, names, n=1)
    has = ", ".join(names) or "none"
    message = (
        f"names {wanted.rollout!r}, which commit {seen.commit[:12]} does not have; it has: {has}"
    )
    return Issue(KEY, message, close[0] if close else None)
