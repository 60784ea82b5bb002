"""Folded states of streams, remembered between messages.

A cached state is only ever a guess about the stream's head: `commit` checks the version, and a miss
evicts. So a cache can make things slow, never wrong.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from infra.consumer import Consumer
from infra.ports import EventLog, Recorded, Snapshot
from schemas.events import Event
from schemas.ids import StreamName

S = TypeVar("S")

SNAPSHOT_EVERY = 500
"""A snapshot is saved when folding a stream took more events than this."""


@dataclass(frozen=True, slots=True)
class Folded(Generic[S]):
    """A stream's state after `version` events."""

    state: S
    version: int


class Unreadable(Exception):
    """A stream holds an event that this version cannot decode, or that its owner cannot fold: nothing
    can be decided on it."""

    def __init__(self, stream: StreamName, error: Exception) -> None:
        super().__init__(f"{stream} cannot be folded: {type(error).__name__}: {error}")
        self.stream = stream


class States:
    """Loads, folds and remembers the streams of consumers. At most `limit` stay in memory."""

    def __init__(self, log: EventLog, *, limit: int = 8192) -> None:
        self._log = log
        self._limit = limit
        self._cache: OrderedDict[StreamName, Folded[Any]] = OrderedDict()

    async def load(
        self, wanted: Mapping[StreamName, Consumer[Any]]
    ) -> dict[StreamName, Folded[Any]]:
        """The states of these streams, each folded by its owner; one read for all that are new.
        Raises Unreadable."""
        known = {stream: self._cache[stream] for stream in wanted if stream in self._cache}
        missing = [stream for stream in wanted if stream not in known]
        if not missing:
            return known
        started = {stream: await self._start(stream, wanted[stream]) for stream in missing}
        tails = await self._log.load({stream: f.version for stream, f in started.items()})
        for stream, folded in started.items():
            tail = tails.get(stream, ())
            known[stream] = _read(stream, wanted[stream], folded, tail)
            if len(tail) > SNAPSHOT_EVERY:
                await self._save(stream, wanted[stream], known[stream])
        self.remember({stream: known[stream] for stream in missing})
        return known

    def remember(self, states: Mapping[StreamName, Folded[Any]]) -> None:
        for stream, folded in states.items():
            self._cache[stream] = folded
            self._cache.move_to_end(stream)
        while len(self._cache) > self._limit:
            self._cache.popitem(last=False)

    def forget(self, streams: Iterable[StreamName]) -> None:
        for stream in streams:
            self._cache.pop(stream, None)

    def observe(self, recorded: Recorded) -> None:
        """An event was seen that a cached state may lack."""
        cached = self._cache.get(recorded.stream)
        if cached is not None and cached.version < recorded.version:
            self.forget((recorded.stream,))

    async def _start(self, stream: StreamName, consumer: Consumer[Any]) -> Folded[Any]:
        fresh = Folded(consumer.initial, 0)
        if consumer.snapshots is None:
            return fresh
        snapshot = await self._log.snapshot(stream, consumer.fold_version)
        if snapshot is None:
            return fresh
        try:
            state = TypeAdapter(consumer.snapshots).validate_json(snapshot.state)
        except ValidationError:
            return fresh
        return Folded(state, snapshot.version)

    async def _save(self, stream: StreamName, consumer: Consumer[Any], folded: Folded[Any]) -> None:
        if consumer.snapshots is None:
            return
        text = TypeAdapter(consumer.snapshots).dump_json(folded.state).decode()
        await self._log.save_snapshot(
            stream, consumer.fold_version, Snapshot(version=folded.version, state=text)
        )


def _read(
    stream: StreamName, consumer: Consumer[S], start: Folded[S], tail: Sequence[Recorded]
) -> Folded[S]:
    try:
        return fold(consumer, start, tail)
    except Exception as error:
        raise Unreadable(stream, error) from error


def fold(
    consumer: Consumer[S], start: Folded[S], events: Sequence[Recorded] | Sequence[Event]
) -> Folded[S]:
    """The state after `events`, which follow `start` without a gap."""
    state = start.state
    for item in events:
        event = item.event if isinstance(item, Recorded) else item
        state = consumer.evolve(state, event)
    return Folded(state, start.version + len(events))
