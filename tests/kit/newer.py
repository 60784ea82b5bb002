"""Events as a newer release of Headrace would write them, and this release made into that one."""

from typing import ClassVar

import pytest

from schemas.events import EVENT_TYPES, CheckpointFailed, CommitRequested, RunWarned
from schemas.events.upcasts import UPCASTS


class RunForeseen(RunWarned):
    """An event of a type that this release does not know."""

    type: ClassVar[str] = "rl.run.foreseen"
    version: ClassVar[int] = 1


class NewerRunWarned(RunWarned):
    """A known event in a version that this release does not know."""

    version: ClassVar[int] = 2


class NewerCheckpointFailed(CheckpointFailed):
    """A decision of a newer release."""

    version: ClassVar[int] = 2


class NewerCommitRequested(CommitRequested):
    """An event of a workspace in a version that this release does not know."""

    version: ClassVar[int] = 2


def upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process one of the release that wrote these events."""
    monkeypatch.setitem(EVENT_TYPES, RunForeseen.type, RunForeseen)
    for kind in (RunWarned, CheckpointFailed, CommitRequested):
        monkeypatch.setattr(kind, "version", 2)
        monkeypatch.setitem(UPCASTS, (kind.type, 1), lambda payload: payload)
