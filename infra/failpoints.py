"""Failpoints: with `HEADRACE_FAILPOINT=name:hit[,name:hit...]` a process kills itself at these points.

`hit` counts from 1: the process dies when the point is passed for the `hit`-th time. `name:hit:stop`
stops the process (SIGSTOP) instead, until somebody continues it; this makes zombies. A point fires once
per HEADRACE_HOME. A marker file is written and synced first, so a restarted process does not kill itself
again. The names are an API (`headrace doctor --failpoints`). Those of the runtime follow from the
registry: `<consumer>.intake.<step>` and `<consumer>.perform.<Effect>.<step>`.
"""

import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas.effects import (
    ChooseCheckpoint,
    CompareGradients,
    DiscoverRollouts,
    Effect,
    ExaminePush,
    FetchCommit,
    GenerateGroup,
    GenerateSample,
    GradeGroup,
    InitializePolicy,
    ListRefs,
    LoadModel,
    PostStatus,
    RegradeGroups,
    ReplayGroup,
    SaveCheckpoint,
    SubmitRun,
    TrainStep,
    UploadCheckpoint,
    VerifyRun,
)

INTAKE_STEPS = ("received", "decided", "tx_before_commit", "tx_after_commit", "offset_committed")
PERFORM_STEPS = ("claimed", "effect_done", "tx_before_commit", "tx_after_commit")
NAMED = (
    "ckpt.shard",
    "ckpt.before_manifest",
    "ckpt.after_manifest",
    "ckpt.before_event",
    "lease.renew",
    "relay.before_send",
    "relay.after_send",
    "relay.after_ack",
    "relay.after_position",
    "reconcile.found",
    "reconcile.before_advance",
    "reconcile.after_advance",
    "judge.answered",
    "judge.recorded",
    "submit.before_commit",
    "submit.secrets_given",
    "submit.after_commit",
    "webhook.before_commit",
    "webhook.after_commit",
    "hub.prepared",
    "hub.committed",
    "archive.packed",
    "archive.removed",
    "archive.blobs_back",
    "archive.restored",
    "upload.joined",
    "upload.claimed",
    "upload.registered",
    "from_run.written",
    "artifact.joined",
    "artifact.checked",
    "artifact.stored",
    "artifact.published",
    "upload.import_file",
    "upload.import_stored",
    "upload.import_appended",
)

CONSUMERS: dict[str, tuple[type[Effect], ...]] = {
    "sync": (FetchCommit, DiscoverRollouts, ListRefs),
    "run": (),
    "rollout": (GenerateGroup, GenerateSample, ReplayGroup),
    "grade": (GradeGroup,),
    "learn": (InitializePolicy, TrainStep),
    "checkpoint": (SaveCheckpoint,),
    "evaluate": (),
    "verify": (VerifyRun,),
    "regrade": (RegradeGroups,),
    "compare": (CompareGradients,),
    "deploy": (LoadModel, ChooseCheckpoint),
    "publish": (UploadCheckpoint,),
    "trigger": (ExaminePush, SubmitRun),
    "status": (PostStatus,),
}
"""Which effects each consumer performs. A test in tests/architecture compares it with the registry."""


def names() -> tuple[str, ...]:
    """Return the names of all failpoints."""
    points = (runtime_points(name, effects) for name, effects in CONSUMERS.items())
    return (*(point for one in points for point in one), *NAMED)


def runtime_points(consumer: str, effects: Iterable[type[Effect]]) -> tuple[str, ...]:
    """Return the points of one consumer, in the order in which a message passes them."""
    intake = tuple(f"{consumer}.intake.{step}" for step in INTAKE_STEPS)
    perform = tuple(
        f"{consumer}.perform.{effect.type}.{step}" for effect in effects for step in PERFORM_STEPS
    )
    return intake + perform


@dataclass(frozen=True, slots=True)
class Point:
    """At which hit a point fires, and which signal the process then sends to itself."""

    hit: int
    number: signal.Signals = signal.SIGKILL


def parse(text: str) -> dict[str, Point]:
    """Parse the setting: `a:1,b:3:stop` gives {"a": Point(1), "b": Point(3, SIGSTOP)}. Raises ValueError
    for other forms."""
    points: dict[str, Point] = {}
    for item in filter(None, text.split(",")):
        rest = item.strip()
        stops = rest.endswith(":stop")
        name, _, count = rest.removesuffix(":stop").rpartition(":")
        if not name or not count.isdigit() or int(count) < 1:
            raise ValueError(
                f"HEADRACE_FAILPOINT holds {item!r}; it may hold name:hit or name:hit:stop, hit from 1"
            )
        points[name] = Point(int(count), signal.SIGSTOP if stops else signal.SIGKILL)
    return points


class Failpoints:
    """The armed points of this process."""

    def __init__(self, armed: Mapping[str, Point], markers: Path) -> None:
        self._armed = armed
        self._left = {name: point.hit for name, point in armed.items()}
        self._markers = markers

    def hit(self, name: str) -> None:
        """Pass a point. If it fires, this returns only after the process was stopped and continued."""
        if name not in self._left:
            return
        self._left[name] -= 1
        if self._left[name] == 0 and self._mark(name):
            os.kill(os.getpid(), self._armed[name].number)

    def _mark(self, name: str) -> bool:
        """Write the marker of a point. Returns False if the point has fired before."""
        self._markers.mkdir(parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        try:
            marker = os.open(self._markers / name, flags, 0o600)
        except FileExistsError:
            return False
        os.fsync(marker)
        os.close(marker)
        return True


_armed = Failpoints({}, Path())


def arm(text: str, home: Path) -> None:
    """Arm this process from the setting's value. Markers are files in `home/failpoints`."""
    global _armed
    _armed = Failpoints(parse(text), home / "failpoints")


def hit(name: str) -> None:
    """Pass the point of this name."""
    _armed.hit(name)
