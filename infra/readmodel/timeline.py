"""When the steps of a run were generated, graded, learned and published, from its log."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.events import (
    BatchAssembled,
    CheckpointSaved,
    GroupGenerated,
    GroupGraded,
    GroupsRequested,
    PolicyUpdated,
    StepSettled,
    StepSkipped,
)
from schemas.ids import GroupKey, Purpose, run_stream

SQL = queries("infra/readmodel/timeline.sql")

GENERATE, GRADE, LEARN, PUBLISH = PHASES = ("generate", "grade", "learn", "publish")
OF_GROUPS = (GroupGenerated.type, GroupGraded.type)
READ = (
    *OF_GROUPS,
    GroupsRequested.type,
    BatchAssembled.type,
    PolicyUpdated.type,
    StepSkipped.type,
    StepSettled.type,
    CheckpointSaved.type,
)
BEGINS: Mapping[str, str] = {
    GroupsRequested.type: GENERATE,
    GroupGenerated.type: GRADE,
    BatchAssembled.type: LEARN,
    PolicyUpdated.type: PUBLISH,
}
"""The phase that begins with an event."""

ENDS: Mapping[str, str] = {
    GroupGenerated.type: GENERATE,
    GroupGraded.type: GRADE,
    PolicyUpdated.type: LEARN,
    StepSettled.type: PUBLISH,
    CheckpointSaved.type: PUBLISH,
}
"""The phase that ends with an event, if no other such event of the step follows."""

MOST_EVENTS = 20_000
LATER_STEPS = 2
"""A checkpoint is saved while these steps run."""

START, END = Cursor(), Cursor(2**62, 2**62)


@dataclass(slots=True)
class Span:
    """From the first event of a phase to its last one so far; `end` is None while there is none."""

    begin: datetime
    end: datetime | None = None

    @property
    def seconds(self) -> float | None:
        return None if self.end is None else (self.end - self.begin).total_seconds()


@dataclass(slots=True)
class StepTimes:
    """The phases of a step that have begun, by name. `groups` counts its graded groups."""

    step: int
    spans: dict[str, Span] = field(default_factory=dict)
    groups: int = 0
    is_skipped: bool = False

    def take(self, kind: str, at: datetime) -> None:
        """Take an event of the step into account. Events come in the order of the log."""
        if kind == GroupGraded.type:
            self.groups += 1
        if kind == StepSkipped.type:
            self.is_skipped = True
        if kind in ENDS and ENDS[kind] in self.spans:
            self.spans[ENDS[kind]].end = at
        if kind in BEGINS:
            self.spans.setdefault(BEGINS[kind], Span(at))


class Timelines:
    """Queries over the events of steps."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def steps(
        self, run: str, *, first: int, last: int, ahead: int
    ) -> tuple[list[StepTimes], int]:
        """The times of the steps from `first` to `last`, and the last step that they cover: an earlier
        one than `last` if there are more than 20,000 events, but at least `first`. Sampling runs at most
        `ahead` steps ahead of training."""
        begin = await self._find_settled(run, first - 1 - ahead)
        end = await self._find_settled(run, last + LATER_STEPS)
        after, upto = begin or START, end or END
        rows = await self._pool.fetch(
            SQL["step_events"],
            run,
            str(after.xid),
            after.position,
            str(upto.xid),
            upto.position,
            READ,
            OF_GROUPS,
            MOST_EVENTS,
        )
        if len(rows) == MOST_EVENTS:
            last = _last_whole_step(rows, first)
        return times_of(rows, first, last), last

    async def _find_settled(self, run: str, step: int) -> Cursor | None:
        """Where a step was settled, found by halves; None when it was not, or not yet."""
        if step < 0:
            return None
        stream = run_stream(run)
        low, high = 1, int(await self._pool.fetchval(SQL["run_version"], stream) or 0)
        while low <= high:
            middle = (low + high) // 2
            row = await self._pool.fetchrow(SQL["settled_from"], stream, middle)
            if row is not None and row["step"] == step:
                return Cursor(row["xid"], row["position"])
            if row is None or row["step"] > step:
                high = middle - 1
            else:
                low = row["version"] + 1
        return None


def _last_whole_step(rows: Sequence[Any], first: int) -> int:
    """The last step that is settled in these rows, but no less than the first one."""
    settled = [int(row["step"]) for row in rows if row["type"] == StepSettled.type]
    return max([first, *settled])


def times_of(rows: Sequence[Any], first: int, last: int) -> list[StepTimes]:
    """The times of steps from rows of events: stream, type, time and step."""
    found: dict[int, StepTimes] = {}
    for step, kind, at in _of_training(rows):
        if first <= step <= last:
            found.setdefault(step, StepTimes(step)).take(kind, at)
    return [found[step] for step in sorted(found)]


def _of_training(rows: Sequence[Any]) -> Iterator[tuple[int, str, datetime]]:
    """The rows that belong to a step of training, and not to a validation."""
    for row in rows:
        step = row["step"]
        if row["type"] in OF_GROUPS:
            key = GroupKey.parse(row["stream"].partition("-")[2])
            if key.purpose != Purpose.TRAIN:
                continue
            step = key.step
        if step is not None:
            yield int(step), row["type"], row["time"]
