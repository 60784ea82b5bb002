"""Checks that the commit that will run contains the rollout that a config names, as far as this is
known.

A commit that is named by its hash cannot change. When it was synced before and lacks the rollout, the
config is refused. A branch may have a newer commit, so there a missing rollout is only a warning.
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

from infra.spine.ports.event_log import Recorded
from schemas.config import Experiment
from schemas.errors import Issue
from schemas.events import CommitRequested, WorkspaceSynced
from schemas.specs import DiscoveredRollout, Entrypoint

KEY = "experiment.rollout"
MAIN = "main.py"


@dataclass(frozen=True, slots=True)
class SyncedCommit:
    """A commit whose rollouts were examined. `is_whole` means that all of its rollouts were examined,
    each at its main.py."""

    commit: str
    rollouts: tuple[DiscoveredRollout, ...]
    is_whole: bool

    def find_rollout(self, entrypoint: Entrypoint) -> DiscoveredRollout | None:
        return next((r for r in self.rollouts if r.entrypoint == entrypoint), None)


def synced_commits(events: Iterable[Recorded]) -> Iterator[SyncedCommit]:
    """Every commit of a workspace's stream that was synced, oldest first."""
    whole: dict[UUID, bool] = {}
    for recorded in events:
        event = recorded.event
        if isinstance(event, CommitRequested):
            whole[recorded.id] = not event.entrypoints
        elif isinstance(event, WorkspaceSynced):
            is_whole = whole.get(event.request, event.requester is None)
            yield SyncedCommit(event.commit, event.rollouts, is_whole=is_whole)


def rollout_issues(experiment: Experiment, commits: Sequence[SyncedCommit]) -> Iterator[Issue]:
    """Why the commit that `experiment.commit_sha` names cannot run its rollout."""
    if experiment.commit_sha is None:
        return
    wanted = entrypoint_of(experiment)
    for commit in commits:
        if commit.commit.startswith(experiment.commit_sha):
            yield from _issues_in(commit, wanted)


def rollout_warnings(experiment: Experiment, commits: Sequence[SyncedCommit]) -> Iterator[str]:
    """A warning when no synced commit of the workspace has the rollout of a branch."""
    if experiment.commit_sha is not None:
        return
    wanted = entrypoint_of(experiment)
    newest = next((commit for commit in reversed(commits) if commit.is_whole), None)
    if newest is None or any(commit.find_rollout(wanted) for commit in commits):
        return
    for issue in _issues_in(newest, wanted):
        yield (
            f"{issue.key} {issue.message}; that is the last commit that was fetched, and the run "
            "fetches the newest one, which must have it"
        )


def entrypoint_of(experiment: Experiment) -> Entrypoint:
    """The file that holds the AgentWorkflow and the Grader."""
    return Entrypoint(rollout=experiment.rollout or "", path=experiment.entrypoint or MAIN)


def _issues_in(commit: SyncedCommit, wanted: Entrypoint) -> Iterator[Issue]:
    """Why this commit cannot run the entry point, as far as is known."""
    found = commit.find_rollout(wanted)
    if found is not None:
        if found.error:
            yield Issue(KEY, f"names {wanted.rollout!r}, which cannot be loaded: {found.error}")
        return
    if not commit.is_whole or wanted.path != MAIN:
        return
    names = [rollout.entrypoint.rollout for rollout in commit.rollouts]
    close = difflib.get_close_matches(wanted.rollout, names, n=1)
    yield Issue(
        KEY,
        f"names {wanted.rollout!r}, which commit {commit.commit[:12]} does not have; it has: "
        f"{', '.join(names) or 'none'}",
        close[0] if close else None,
    )
