"""The eight hops of one sample: what happened to it, in which file of the code, and when.

It is read from the log alone. Each hop is an event. The events of a sample are found by its group,
its step and its run.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime

from infra.spine.ports.event_log import Cursor, EventStore, Recorded
from schemas.errors import InvalidConfig, NotFound
from schemas.events import (
    BatchAssembled,
    CheckpointSaved,
    Event,
    GroupGenerated,
    GroupGraded,
    GroupsRequested,
    GroupsSettled,
    PolicyUpdated,
    RunRequested,
    WorkspaceSynced,
)
from schemas.ids import (
    REFUTED,
    GroupId,
    GroupKey,
    checkpoint_stream,
    grade_stream,
    group_stream,
    parse_sample_id,
    run_stream,
)
from schemas.models.fork import ForkPoint

PAGE = 1000
OF_THE_RUN = (RunRequested, GroupsRequested, GroupsSettled, BatchAssembled, PolicyUpdated)


@dataclass(frozen=True, slots=True)
class Hop:
    """One of the eight hops. `ms_since_previous` is the time since the previous hop in milliseconds, and
    None for the first one. `cursor` is where its event is in the log, which changes when the log moves
    to another cluster."""

    hop: int
    file: str
    what: str
    event: str
    event_id: str
    cursor: str
    at: datetime
    ms_since_previous: float | None

    def to_json(self) -> Mapping[str, object]:
        """The hop as JSON, without its cursor, so that it is the same after a move."""
        found = asdict(self)
        del found["cursor"]
        return found


@dataclass(frozen=True, slots=True)
class Trace:
    """The hops of a sample that have happened. `reason` says why nothing is learned from it, if that is
    decided."""

    hops: tuple[Hop, ...]
    reason: str | None = None


async def trace(log: EventStore, run: RunRequested, sample: str) -> Trace:
    """The hops of a sample. Raises InvalidConfig when `sample` is not the id of a sample, and NotFound
    when the run has no such sample."""
    try:
        group, index = parse_sample_id(sample)
        key = GroupKey.parse(group)
    except ValueError as error:
        raise InvalidConfig(
            f"{sample!r} is not the id of a sample; `headrace train samples {run.run_name}` shows "
            "the ids"
        ) from error
    if key.owner != run.run:
        raise NotFound(
            f"sample {sample} belongs to another run; `headrace train samples {run.run_name}` shows "
            "its ids"
        )
    found, dropped = await _find_events(log, run, group, key)
    if found[2] is None:
        raise NotFound(
            f"run {run.run_name} has no sample {sample}; `headrace train samples {run.run_name}` "
            "shows its ids"
        )
    return Trace(tuple(_hops(found)), dropped or _failure(found[4], index))


FILES = (
    ("producers/core/submit.py", "the TOML was validated, the dataset pinned"),
    ("consumers/sync/consumer.py", "the commit was fetched, a snapshot stored"),
    ("consumers/run/rules.py", "the group was requested, within the lag bound"),
    ("consumers/rollout/consumer.py", "the policy answered, at a pinned version"),
    ("consumers/grade.py", "the grader scored the group"),
    ("consumers/run/rules.py", "the groups of the step are settled: the batch is fixed"),
    ("consumers/learn/consumer.py -> trainer/grpo.py", "one optimizer step was taken"),
    ("consumers/checkpoint.py", "the manifest was written last"),
)

HopEvents = Sequence[Recorded | None]


def _failure(graded: Recorded | None, index: int) -> str | None:
    """Why a sample of a group that is in its batch is left out, if it is."""
    if graded is None or not isinstance(graded.event, GroupGraded):
        return None
    grade = next((one for one in graded.event.grades if one.index == index), None)
    if grade is None or grade.reward is not None:
        return None
    entry = next((one for one in graded.event.entries if one.index == index), None)
    why = ""
    if grade.failure:
        why = f": {grade.failure.category}: {grade.failure.message}"
    elif entry and entry.failure:
        why = f": {entry.failure}: {entry.message}"
    return f"the sample has no reward, so it is left out of its group{why}"


def _why_dropped(settled: GroupsSettled, key: GroupKey) -> str | None:
    """Why the group is in no batch, if it was dropped."""
    for one in settled.groups:
        if (one.group.slot, one.group.replacement) == (key.slot, key.replacement) and one.dropped:
            return f"its group is in no batch: {one.dropped}"
    return None


def _text_of_fork(event: Event) -> str | None:
    """The text of a hop of a fork that took something from its parent; None for another hop."""
    match event:
        case RunRequested(fork=ForkPoint() as point):
            return f"the run {point.parent} was forked after step {point.step}"
        case GroupGenerated(replayed=str() as run):
            return f"the samples that run {run} recorded were taken"
        case _:
            return None


def _hops(found: HopEvents) -> Iterator[Hop]:
    previous: datetime | None = None
    for number, (recorded, (file, what)) in enumerate(zip(found, FILES, strict=True), 1):
        if recorded is None:
            continue
        since = (recorded.time - previous).total_seconds() * 1000 if previous else None
        yield Hop(
            hop=number,
            file=file,
            what=_text_of_fork(recorded.event) or what,
            event=recorded.event.type,
            event_id=str(recorded.id),
            cursor=str(recorded.cursor),
            at=recorded.time,
            ms_since_previous=None if since is None else round(since, 3),
        )
        previous = recorded.time


async def _find_events(
    log: EventStore, run: RunRequested, group: GroupId, key: GroupKey
) -> tuple[HopEvents, str | None]:
    """The events of the hops, and why the group is in no batch, if that is decided."""
    streams = [group_stream(group), grade_stream(group), checkpoint_stream(run.run)]
    loaded = await log.load(dict.fromkeys(streams, 0))
    generated, graded, checkpoints = (loaded[stream] for stream in streams)
    requested: Recorded | None = None
    begun = batch = updated = None
    dropped: str | None = None
    again = replace(key, replacement=key.replacement + REFUTED)
    async for recorded in _events(log, run.run, OF_THE_RUN):
        match recorded.event:
            case RunRequested():
                begun = begun or recorded
            case GroupsRequested() if _requests_group(recorded.event, key):
                requested = requested or recorded
            case GroupsRequested() if _requests_group(recorded.event, again):
                dropped = f"samples of its group were refuted, so it was generated again: {again}"
            case GroupsSettled(step=key.step):
                dropped = dropped or _why_dropped(recorded.event, key)
            case BatchAssembled(step=key.step):
                batch = recorded
            case PolicyUpdated(step=key.step):
                updated = recorded
            case _:
                pass
    used = batch is not None and _contains_group(batch.event, key)
    if batch is not None and not used and dropped is None:
        dropped = "its group is in no batch: the step had enough other groups"
    saved = [r for r in checkpoints if isinstance(r.event, CheckpointSaved)]
    after = [
        r for r in saved if isinstance(r.event, CheckpointSaved) and r.event.spec.step >= key.step
    ]
    hops = (
        begun,
        await _find_synced(log, run),
        requested,
        _first(generated, GroupGenerated),
        _first(graded, GroupGraded),
        batch if used else None,
        updated if used else None,
        after[0] if used and after else None,
    )
    return hops, dropped


async def _events(
    log: EventStore, about: str, kinds: Sequence[type[Event]]
) -> AsyncIterator[Recorded]:
    after, types = Cursor(), [kind.type for kind in kinds]
    while found := await log.read(about, after=after, limit=PAGE, types=types):
        for recorded in found:
            yield recorded
        after = found[-1].cursor


async def _find_synced(log: EventStore, run: RunRequested) -> Recorded | None:
    if run.workspace is None:
        return None
    stream = run_stream(run.run)
    async for recorded in _events(log, run.workspace, (WorkspaceSynced,)):
        if isinstance(recorded.event, WorkspaceSynced) and recorded.event.requester == stream:
            return recorded
    return None


def _requests_group(event: GroupsRequested, key: GroupKey) -> bool:
    return (event.purpose, event.step) == (key.purpose, key.step) and any(
        (slot.slot, slot.replacement) == (key.slot, key.replacement) for slot in event.slots
    )


def _contains_group(event: Event, key: GroupKey) -> bool:
    return isinstance(event, BatchAssembled) and any(
        (group.slot, group.replacement) == (key.slot, key.replacement) for group in event.groups
    )


def _first(recorded: Sequence[Recorded], kind: type[Event]) -> Recorded | None:
    return next((found for found in recorded if isinstance(found.event, kind)), None)
