"""Keeps the folded states of streams in memory between messages.

A cached state may be behind its stream. `commit` checks the version, and a miss evicts the state. So a
stale cache costs time, but never gives a wrong decision. The same holds for snapshots. One is saved
every few hundred events, so that a process that restarts after a crash folds only that many events and
not a whole history.

A stream may continue another one (`Consumer.prefix_of`). Its state begins with the fold of that one up
to a version, which may itself continue another one. Of such streams one snapshot in every few thousand
versions is kept, so that no prefix is folded from its beginning.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from infra.spine.ports.event_log import EventStore, Recorded, Snapshot
from infra.spine.postgres.errors import DatabaseUnavailable
from infra.spine.runtime.consumer import AnyConsumer, Consumer, Prefix
from schemas.envelope import NewerEvent
from schemas.events.event import Event
from schemas.ids import StreamName

logger = logging.getLogger(__name__)

S = TypeVar("S")

SNAPSHOT_EVERY = 500
"""A snapshot is saved when a stream has grown by more events than this since the last one."""

KEPT_EVERY = 5000
"""The oldest snapshot in so many versions of a stream is kept if others may continue the stream."""

PAGE = 5000
"""Events read at once. The fold of a whole history must not hold all of it in memory."""


@dataclass(frozen=True, slots=True)
class FoldedState(Generic[S]):
    """A stream's state after `version` events. `snapshot_version` is the version of its newest
    snapshot."""

    state: S
    version: int
    snapshot_version: int = 0


class UnfoldableStream(Exception):
    """A stream has an event that this version cannot decode, or that its owner cannot fold. Nothing can
    be decided on such a stream. `newer` says that a newer release wrote the event, and can fold it."""

    def __init__(self, stream: StreamName, error: Exception) -> None:
        super().__init__(f"{stream} cannot be folded: {type(error).__name__}: {error}")
        self.stream = stream
        self.newer = isinstance(error, NewerEvent)


class StateCache:
    """Loads, folds and remembers the streams of consumers. At most `limit` stay in memory."""

    def __init__(self, log: EventStore, *, limit: int = 8192) -> None:
        self._log = log
        self._limit = limit
        self._cache: OrderedDict[StreamName, FoldedState[Any]] = OrderedDict()

    async def load(
        self, wanted: Mapping[StreamName, AnyConsumer]
    ) -> dict[StreamName, FoldedState[Any]]:
        """Return the states of these streams, each folded by its owner. All streams that are not in
        memory are read together. Raises UnfoldableStream."""
        known = {stream: self._cache[stream] for stream in wanted if stream in self._cache}
        missing = [stream for stream in wanted if stream not in known]
        if not missing:
            return known
        owners = {stream: wanted[stream] for stream in missing}
        found = {stream: await self._newest_snapshot(stream, owners[stream]) for stream in missing}
        read = PAGE
        while read == PAGE:
            above = {stream: folded.version for stream, folded in found.items()}
            tails = await self._log.load(above, limit=PAGE)
            for stream, tail in tails.items():
                start = found[stream]
                if start.version == 0 and tail:
                    start = await self._fold_prefix(stream, owners[stream], tail[0])
                found[stream] = _fold_tail(stream, owners[stream], start, tail)
            read = sum(len(tail) for tail in tails.values())
            if read == PAGE:  # a long fold, which the next process should not repeat
                for stream in owners:
                    found[stream] = await self._save_if_grown(stream, owners[stream], found[stream])
        self.remember(found)
        await self.save_snapshots(owners)
        return {**known, **{stream: self._cache.get(stream, found[stream]) for stream in missing}}

    async def save_snapshots(self, owners: Mapping[StreamName, AnyConsumer]) -> None:
        """Save a snapshot of each of these streams that has grown enough since its last one. A snapshot
        that cannot be saved now is saved later."""
        for stream, consumer in owners.items():
            folded = self._cache.get(stream)
            if folded is not None:
                self._cache[stream] = await self._save_if_grown(stream, consumer, folded)

    async def _save_if_grown(
        self, stream: StreamName, consumer: AnyConsumer, folded: FoldedState[Any]
    ) -> FoldedState[Any]:
        """Save a snapshot of a stream that has grown enough since its last one. Returns the state, which
        knows of the snapshot."""
        if consumer.snapshots is None or folded.version - folded.snapshot_version <= SNAPSHOT_EVERY:
            return folded
        try:
            await self._save_snapshot(stream, consumer, folded)
        except DatabaseUnavailable as error:
            logger.info("a snapshot of %s is not saved: %s", stream, error)
            return folded
        return replace(folded, snapshot_version=folded.version)

    async def _fold_prefix(
        self, stream: StreamName, consumer: AnyConsumer, first: Recorded
    ) -> FoldedState[Any]:
        """Return the state before the first event of a stream: the fold of what it continues. Streams
        that continue each other are folded in a loop, however many there are. Raises
        UnfoldableStream."""
        chain: list[Prefix] = []
        state: FoldedState[Any] = FoldedState(consumer.initial, 0)
        prefix = _prefix_of(stream, consumer, first)
        while prefix is not None:
            chain.append(prefix)
            state = await self._newest_snapshot(prefix[0], consumer, upto=prefix[1])
            if state.version:
                break
            begins = await self._log.events_at([(prefix[0], 1)])
            if not begins:
                missing = LookupError(f"it continues {prefix[0]}, which is not in the log")
                raise UnfoldableStream(stream, missing)
            prefix = _prefix_of(stream, consumer, begins[0])
        for parent, upto in reversed(chain):
            state = await self._fold_upto(parent, upto, consumer, state)
            state = FoldedState(state.state, 0)
        return state

    async def _fold_upto(
        self, stream: StreamName, upto: int, consumer: AnyConsumer, state: FoldedState[Any]
    ) -> FoldedState[Any]:
        """Fold a stream from a state up to a version. Raises UnfoldableStream if it is shorter."""
        while state.version < upto:
            above = {stream: state.version}
            tail = (await self._log.load(above, limit=min(PAGE, upto - state.version)))[stream]
            tail = [recorded for recorded in tail if recorded.version <= upto]
            if not tail:
                raise UnfoldableStream(stream, LookupError(f"it has no version {upto}"))
            state = _fold_tail(stream, consumer, state, tail)
            state = await self._save_if_grown(stream, consumer, state)
        return state

    def remember(self, states: Mapping[StreamName, FoldedState[Any]]) -> None:
        """Keep these states. Beyond the limit, the least recently used ones are dropped."""
        for stream, folded in states.items():
            self._cache[stream] = folded
            self._cache.move_to_end(stream)
        while len(self._cache) > self._limit:
            self._cache.popitem(last=False)

    def forget(self, streams: Iterable[StreamName]) -> None:
        for stream in streams:
            self._cache.pop(stream, None)

    def clear(self) -> None:
        """Forget everything, because the log has another history now."""
        self._cache.clear()

    def observe(self, recorded: Recorded) -> None:
        """Forget the stream's state if it lacks this event."""
        cached = self._cache.get(recorded.stream)
        if cached is not None and cached.version < recorded.version:
            self.forget((recorded.stream,))

    async def _newest_snapshot(
        self, stream: StreamName, consumer: AnyConsumer, *, upto: int | None = None
    ) -> FoldedState[Any]:
        fresh = FoldedState(consumer.initial, 0)
        if consumer.snapshots is None:
            return fresh
        snapshot = await self._log.snapshot(stream, consumer.fold_version, upto=upto)
        if snapshot is None:
            return fresh
        try:
            state = TypeAdapter(consumer.snapshots).validate_json(snapshot.state)
        except ValidationError:
            return fresh
        return FoldedState(state, snapshot.version, snapshot.version)

    async def _save_snapshot(
        self, stream: StreamName, consumer: AnyConsumer, folded: FoldedState[Any]
    ) -> None:
        state_type: Any = consumer.snapshots
        text = TypeAdapter(state_type).dump_json(folded.state).decode()
        await self._log.save_snapshot(
            stream,
            consumer.fold_version,
            Snapshot(version=folded.version, state=text),
            keep_every=KEPT_EVERY if consumer.prefix_of is not None else None,
        )


def _prefix_of(stream: StreamName, consumer: AnyConsumer, first: Recorded) -> Prefix | None:
    """Return what a stream with this first event continues. Raises UnfoldableStream."""
    if consumer.prefix_of is None:
        return None
    try:
        return consumer.prefix_of(first.event)
    except Exception as error:
        raise UnfoldableStream(stream, error) from error


def _fold_tail(
    stream: StreamName,
    consumer: Consumer[S, Any, Any, Any, Any],
    start: FoldedState[S],
    tail: Sequence[Recorded],
) -> FoldedState[S]:
    try:
        return fold(consumer, start, tail)
    except Exception as error:  # `evolve` has a bug, or the log does
        raise UnfoldableStream(stream, error) from error


def fold(
    consumer: Consumer[S, Any, Any, Any, Any],
    start: FoldedState[S],
    events: Sequence[Recorded] | Sequence[Event],
) -> FoldedState[S]:
    """Return the state after `events`, which follow `start`. Recorded events may have gaps, where old
    ones were removed (docs/retention.md)."""
    state, version = start.state, start.version
    for item in events:
        event = item.event if isinstance(item, Recorded) else item
        state = consumer.evolve(state, event)
        version = item.version if isinstance(item, Recorded) else version + 1
    return FoldedState(state, version, start.snapshot_version)
