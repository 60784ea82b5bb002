"""A stream that continues another one begins with the fold of that one, from a snapshot near the place,
however many streams continue each other."""

from dataclasses import replace
from typing import Any, cast
from uuid import uuid4

import pytest

from infra.spine.memory.event_log import MemoryLog, World
from infra.spine.ports.event_log import EventLog
from infra.spine.runtime import folded_states
from infra.spine.runtime.consumer import AnyConsumer, Prefix
from infra.spine.runtime.folded_states import StateCache, UnfoldableStream
from schemas.events import CheckpointFailed, Event
from schemas.ids import StreamName, checkpoint_stream
from tests.kit.hosting import Script, consumer

EVERY = 5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded_states, "SNAPSHOT_EVERY", EVERY)
    monkeypatch.setattr(folded_states, "KEPT_EVERY", 20)
    monkeypatch.setattr(folded_states, "PAGE", 10)


def prefix_of(event: Event) -> Prefix | None:
    """In these streams a first event with a message `RUN VERSION` continues the stream of that run."""
    assert isinstance(event, CheckpointFailed)
    run, mark, version = event.message.partition(" ")
    return (checkpoint_stream(run), int(version)) if mark else None


def evolve(state: tuple[str, ...], event: CheckpointFailed) -> tuple[str, ...]:
    return (*state, f"{event.run}/{event.step}")


def continuing(seen: list[Event]) -> AnyConsumer:
    """A consumer whose state lists the events that it folded."""

    def counted(state: tuple[str, ...], event: Any) -> tuple[str, ...]:
        seen.append(event)
        return evolve(state, event)

    return replace(
        consumer(Script()),
        initial=(),
        evolve=cast("Any", counted),
        snapshots=cast("Any", tuple[str, ...]),
        prefix_of=cast("Any", prefix_of),
    )


async def write(log: EventLog, run: str, count: int, *, after: str = "none") -> None:
    for step in range(1, count + 1):
        message = after if step == 1 else "more"
        await log.append([CheckpointFailed(run=run, step=step, message=message)], cause=uuid4())


async def fold(log: EventLog, run: str) -> tuple[tuple[str, ...], int]:
    """The state of a run's stream in a process that has just started, and how many events were folded
    for it."""
    seen: list[Event] = []
    stream: StreamName = checkpoint_stream(run)
    loaded = await StateCache(log).load({stream: continuing(seen)})
    return loaded[stream].state, len(seen)


async def test_a_stream_begins_with_the_state_at_the_place_that_it_continues() -> None:
    log = MemoryLog(World())
    await write(log, "a", 8)
    await write(log, "b", 2, after="a 3")
    state, _ = await fold(log, "b")
    assert state == ("a/1", "a/2", "a/3", "b/1", "b/2")
    assert (await fold(log, "a"))[0] == tuple(f"a/{step}" for step in range(1, 9))


async def test_a_long_prefix_is_folded_from_a_snapshot_near_its_end() -> None:
    log = MemoryLog(World())
    await write(log, "a", 100)
    await fold(log, "a")
    await write(log, "b", 1, after="a 47")
    state, folded = await fold(log, "b")
    assert len(state) == 48
    assert folded <= 20


async def test_fifty_streams_that_continue_each_other_are_folded() -> None:
    log = MemoryLog(World())
    await write(log, "r0", 3)
    for depth in range(1, 51):
        await write(log, f"r{depth}", 2, after=f"r{depth - 1} 2")
    state, _ = await fold(log, "r50")
    assert state == ("r0/1", "r0/2", *(f"r{d}/{n}" for d in range(1, 51) for n in (1, 2)))


async def test_a_stream_whose_prefix_is_gone_says_so() -> None:
    log = MemoryLog(World())
    await write(log, "a", 2)
    await write(log, "b", 1, after="gone 2")
    await write(log, "c", 1, after="a 7")
    with pytest.raises(
        UnfoldableStream, match="continues checkpoint-gone, which is not in the log"
    ):
        await fold(log, "b")
    with pytest.raises(UnfoldableStream, match="it has no version 7"):
        await fold(log, "c")
