"""The event log and the effects in memory, with the same rules as on Postgres. Nothing is written to
disk. These adapters are part of the product, and pass the contract suites of those on Postgres.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

from infra.spine.memory import snapshots, turns
from infra.spine.ports.appender import APPENDER
from infra.spine.ports.effects import Claimed, Holding, NewEffect, StaleGeneration
from infra.spine.ports.event_log import (
    Commit,
    CommitMiss,
    CommitRefused,
    Cursor,
    EdgeAppend,
    EdgeAppended,
    Encoded,
    NewEvent,
    Recorded,
    Snapshot,
)
from infra.spine.postgres.codec import edge_ids, encode
from infra.spine.postgres.effects import CRASH_LIMIT
from infra.spine.postgres.group_append import append_group
from infra.spine.postgres.history import check
from schemas.effects.effect import Lane
from schemas.errors import Refused
from schemas.events.decider_version import DECIDER_VERSION
from schemas.events.event import Event
from schemas.ids import ConsumerName, EffectId, EventId, StreamName, WorkerId
from schemas.text import well_formed


@dataclass
class World:
    """The content of a Postgres database, in memory. `now` is its clock, which tests move with
    `advance`."""

    events: list[Recorded] = field(default_factory=list)
    inbox: dict[tuple[ConsumerName, EventId], int] = field(default_factory=dict)
    watermarks: dict[ConsumerName, Cursor] = field(default_factory=dict)
    effects: dict[EffectId, turns.EffectRow] = field(default_factory=dict)
    gates: dict[str, str] = field(default_factory=dict)
    holds: Counter[str] = field(default_factory=Counter)
    weights: dict[str, int] = field(default_factory=dict)
    deciders: dict[str, int] = field(default_factory=dict)
    workers: dict[WorkerId, datetime] = field(default_factory=dict)
    generations: Counter[WorkerId] = field(default_factory=Counter)
    artifacts: dict[str, bytes] = field(default_factory=dict)
    snapshots: dict[tuple[StreamName, int], list[Snapshot]] = field(default_factory=dict)
    now: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    xid: int = 0
    history_epoch: int = 0
    order: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def version(self, stream: StreamName) -> int:
        return sum(recorded.stream == stream for recorded in self.events)

    def gate(self, run: str) -> str:
        state = self.gates.get(run, "open")
        return "paused" if state == "open" and self.holds[run] else state

    def has_lease(self, worker: WorkerId | None) -> bool:
        return worker is not None and self.workers.get(worker, self.now) > self.now


class MemoryLog:
    """`EventLog` in memory. Each commit is one transaction with its own xid."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def history_epoch(self) -> int:
        return self._world.history_epoch

    async def load(
        self, streams: Mapping[StreamName, int], *, limit: int | None = None
    ) -> Mapping[StreamName, Sequence[Recorded]]:
        left = len(self._world.events) if limit is None else limit
        found: dict[StreamName, Sequence[Recorded]] = dict.fromkeys(streams, ())
        for stream in sorted(streams):
            events = [r for r in self._world.events if r.stream == stream]
            found[stream] = [r for r in events if r.version > streams[stream]][:left]
            left -= len(found[stream])
        return found

    async def versions(self, streams: Iterable[StreamName]) -> Mapping[StreamName, int]:
        return {stream: self._world.version(stream) for stream in streams}

    async def commit(self, commit: Commit) -> Sequence[Recorded]:
        check(self._world.history_epoch)
        self._check(commit)
        world = self._world
        world.xid += 1
        recorded = [self._record(new) for new in commit.events]
        world.events += recorded
        world.inbox.update(dict.fromkeys(commit.consumed, world.xid))
        world.weights.update(commit.weights)
        for effect_id, _ in commit.finished:
            del world.effects[effect_id]
        for new_effect in commit.effects:
            self._write_effect(new_effect, commit.worker)
        world.artifacts.update({a.sha256: a.data for a in commit.artifacts})
        for new in commit.events:
            self._move_gate(new.event)
            if new.event.needed_decider > 1:
                world.deciders[new.event.run_id] = new.event.needed_decider
        world.changed.set()
        return recorded

    def _check(self, commit: Commit) -> None:
        """Check all conditions before anything is written. Raises CommitRefused, CommitMiss."""
        world = self._world
        for text in commit.texts:
            if "\0" in text or text != well_formed(text):
                raise CommitRefused(f"the database cannot hold it: {text!r} is not text")
        for key in commit.consumed:
            if key in world.inbox:
                raise CommitMiss("duplicate", str(key))
            consumer, event_id = key
            cursor = commit.cursors.get(event_id)
            if cursor is not None and cursor <= world.watermarks.get(consumer, Cursor()):
                raise CommitMiss("duplicate", str(key))
        for effect_id, epoch in commit.finished:
            row = world.effects.get(effect_id)
            if row is None or (row.worker, row.epoch) != (commit.worker, epoch):
                raise CommitMiss("fenced", str(effect_id))
        for stream, expected in sorted((commit.expected or {}).items()):
            if world.version(stream) != expected:
                raise CommitMiss("stale", stream)

    def _record(self, new: NewEvent) -> Recorded:
        data = encode(new.event)
        self._world.order += 1
        return Recorded(
            id=new.id,
            stream=new.stream,
            version=new.version,
            cursor=Cursor(self._world.xid, self._world.order),
            time=self._world.now,
            causation=new.causation,
            correlation=new.correlation,
            traceparent=new.traceparent,
            run=new.event.run_id,
            payload=Encoded(new.event.type, new.event.version, data),
            actor=new.actor,
        )

    def _write_effect(self, new: NewEffect, worker: WorkerId | None) -> None:
        if self._world.gate(new.effect.run_id) == "closed":
            return
        self._world.order += 1
        turn = turns.next_turn(self._world, new.effect)
        effect = turns.EffectRow(
            new, self._world.order, self._world.now, turn=turn, size=new.effect.size
        )
        if new.claimed:
            effect.worker, effect.epoch = worker, 1
            effect.claimed_at = self._world.now
        self._world.effects.setdefault(new.effect.id, effect)

    def _move_gate(self, event: Event) -> None:
        world = self._world
        rested = world.gate(event.run_id) == "paused"
        last = {lane: turns.lane_turn(world, lane) for lane in Lane} if rested else {}
        self._set_gate(event)
        if rested and world.gate(event.run_id) == "open":
            ours = [row for row in world.effects.values() if row.new.effect.run_id == event.run_id]
            for row in sorted(ours, key=lambda row: (row.turn, row.order)):
                effect = row.new.effect
                last[effect.lane] += turns.share_of(world, effect)
                row.turn = last[effect.lane]

    def _set_gate(self, event: Event) -> None:
        world = self._world
        if event.hold is not None:
            holds = world.holds[event.run_id] + (1 if event.hold == "hold" else -1)
            world.holds[event.run_id] = max(holds, 0)
        if event.gate == "reopened":
            if world.gates.get(event.run_id) == "closed":
                world.gates[event.run_id] = "open"
            return
        if event.gate is None or world.gates.get(event.run_id) == "closed":
            return
        world.gates[event.run_id] = event.gate
        if event.gate == "closed":
            world.effects = {
                key: row
                for key, row in world.effects.items()
                if row.new.effect.run_id != event.run_id
            }

    async def append(
        self, events: Sequence[Event], *, cause: UUID, traceparent: str | None = None
    ) -> Sequence[Recorded]:
        ids = edge_ids(events, cause)
        if known := [r for r in self._world.events if r.id in ids]:
            return known
        versions = {event.stream: self._world.version(event.stream) for event in events}
        expected, new = dict(versions), []
        for event_id, event in zip(ids, events, strict=True):
            versions[event.stream] += 1
            new.append(
                NewEvent(
                    id=event_id,
                    stream=event.stream,
                    version=versions[event.stream],
                    event=event,
                    causation=cause,
                    correlation=cause,
                    traceparent=traceparent,
                    actor=APPENDER.get(),
                )
            )
        return await self.commit(Commit(expected=expected, events=tuple(new)))

    async def append_all(self, batch: Sequence[EdgeAppend]) -> Sequence[EdgeAppended | Refused]:
        return await append_group(self, batch)

    async def before_append(
        self, streams: Sequence[StreamName], ids: Sequence[EventId]
    ) -> tuple[Mapping[StreamName, int], Mapping[EventId, Recorded]]:
        """As `AppendStore.before_append`."""
        known = {r.id: r for r in self._world.events if r.id in ids}
        return await self.versions(streams), known

    async def tail(
        self,
        after: Cursor,
        *,
        limit: int,
        types: Sequence[str] | None = None,
        upto: Cursor | None = None,
    ) -> tuple[Sequence[Recorded], Cursor]:
        check(self._world.history_epoch)
        page = [r for r in self._world.events if r.cursor > after][:limit]
        page = [r for r in page if upto is None or r.cursor <= upto]
        wanted = [r for r in page if types is None or r.type in types]
        return wanted, page[-1].cursor if page else after

    async def has_events_after(self, after: Cursor) -> bool:
        return await self.visible_head() > after

    async def visible_head(self) -> Cursor:
        return max((recorded.cursor for recorded in self._world.events), default=Cursor())

    async def reaches(self, cursor: Cursor) -> bool:
        return await self.visible_head() >= cursor

    async def clock_time(self) -> datetime:
        return self._world.now

    async def events_at(self, places: Sequence[tuple[StreamName, int]]) -> Sequence[Recorded]:
        wanted = set(places)
        return [r for r in self._world.events if (r.stream, r.version) in wanted]

    async def unconsumed_at(
        self, places: Mapping[tuple[StreamName, int], Collection[ConsumerName]]
    ) -> Sequence[tuple[Recorded, frozenset[ConsumerName]]]:
        found = []
        for recorded in await self.events_at(list(places)):
            names = places[recorded.stream, recorded.version]
            due = await self.unconsumed([(name, recorded) for name in names])
            found.append((recorded, frozenset(name for name, _ in due)))
        return found

    async def read(
        self, run: str, *, after: Cursor, limit: int, types: Sequence[str] | None = None
    ) -> Sequence[Recorded]:
        events = (r for r in self._world.events if r.run == run and r.cursor > after)
        found = [r for r in events if r.is_known]
        return [r for r in found if types is None or r.type in types][:limit]

    async def filter_consumed(
        self, keys: Sequence[tuple[ConsumerName, EventId]]
    ) -> frozenset[tuple[ConsumerName, EventId]]:
        return frozenset(key for key in keys if key in self._world.inbox)

    async def unconsumed(
        self, messages: Sequence[tuple[ConsumerName, Recorded]]
    ) -> Sequence[tuple[ConsumerName, Recorded]]:
        marks = self._world.watermarks
        return [
            (name, recorded)
            for name, recorded in messages
            if (name, recorded.id) not in self._world.inbox
            and recorded.cursor > marks.get(name, Cursor())
        ]

    async def watermark(self, consumer: ConsumerName) -> Cursor:
        return self._world.watermarks.get(consumer, Cursor())

    async def advance(self, consumers: Sequence[ConsumerName], cursor: Cursor) -> None:
        check(self._world.history_epoch)
        world = self._world
        world.watermarks |= {
            name: max(cursor, world.watermarks.get(name, Cursor())) for name in consumers
        }
        world.inbox = {
            key: xid
            for key, xid in world.inbox.items()
            if key[0] not in consumers or xid >= cursor.xid
        }

    async def snapshot(
        self, stream: StreamName, fold_version: int, *, upto: int | None = None
    ) -> Snapshot | None:
        return snapshots.newest(self._world.snapshots.get((stream, fold_version), []), upto)

    async def save_snapshot(
        self,
        stream: StreamName,
        fold_version: int,
        snapshot: Snapshot,
        *,
        keep_every: int | None = None,
    ) -> None:
        known = self._world.snapshots.setdefault((stream, fold_version), [])
        snapshots.keep(known, snapshot, keep_every)

    async def artifact(self, sha256: str) -> bytes | None:
        return self._world.artifacts.get(sha256)


class MemoryEffects:
    """`infra.spine.ports.effects.Effects` in memory."""

    def __init__(self, world: World, *, decider: int = DECIDER_VERSION) -> None:
        self._world = world
        self._decider = decider

    async def register(
        self,
        worker: WorkerId,
        *,
        host: str,
        pid: int,
        lease_s: float,
        lanes: Sequence[Lane] = (),
    ) -> None:
        self._world.workers[worker] = self._world.now + timedelta(seconds=lease_s)

    async def renew(self, worker: WorkerId, *, lease_s: float) -> bool:
        if not self._world.has_lease(worker):
            return False
        self._world.workers[worker] = self._world.now + timedelta(seconds=lease_s)
        return True

    async def expire(self, worker: WorkerId) -> None:
        if worker in self._world.workers:
            self._world.workers[worker] = min(self._world.workers[worker], self._world.now)

    async def claim(
        self,
        worker: WorkerId,
        *,
        room: Mapping[Lane, int],
        consumers: Sequence[ConsumerName],
        generation: int = 0,
        most: Mapping[Lane, int] | None = None,
        samples: int | None = None,
        spare: Mapping[Lane, int] | None = None,
    ) -> Sequence[Claimed]:
        world = self._world
        if world.has_lease(worker) and world.generations[worker] != generation:
            raise StaleGeneration(worker, generation)
        if world.has_lease(worker):
            turns.give_back_effects(world, worker)
        due = [
            row
            for row in sorted(world.effects.values(), key=lambda row: (row.turn, row.order))
            if row.new.effect.lane in room
            and row.new.consumer in consumers
            and row.due_at <= world.now
            and row.worker is None
            and world.has_lease(worker)
            and self._may_work_on(row.new.effect.run_id)
        ]
        left, taken, claimed = Counter(room), turns.places_of_runs(world), []
        own = turns.places_of_runs(world, worker)
        limited = set(Lane) if samples is not None else set(most or {})
        beyond = {lane: n for lane, n in (spare or {}).items() if lane not in limited}
        for row in due:
            lane, run = row.new.effect.lane, row.new.effect.run_id
            few = beyond.get(lane, 0)
            fits = own[run, lane] + row.size <= few and left[lane] - row.size >= -few
            if (left[lane] > 0 or fits) and taken[run, lane] < (most or {}).get(lane, sys.maxsize):
                left[lane] -= row.size
                taken[run, lane] += row.size
                own[run, lane] += row.size
                row.worker = worker
                row.epoch += 1
                row.claimed_at = world.now
                claimed.append(_claim_of(row))
        return claimed

    async def retry(
        self,
        claimed: Claimed,
        *,
        delay_s: float,
        error: str,
        counted: bool = True,
        wasted_s: float = 0.0,
    ) -> None:
        row = self._row_of(claimed)
        if row is not None:
            row.worker = None
            row.wasted_s += wasted_s
            row.attempts += int(counted)
            row.due_at = self._world.now + timedelta(seconds=delay_s)

    async def release(self, claimed: Claimed, *, wasted_s: float = 0.0) -> None:
        row = self._row_of(claimed)
        if row is not None:
            row.worker = None
            row.wasted_s += wasted_s

    async def holding(self, worker: WorkerId) -> Holding:
        world = self._world
        claims = {key: row.epoch for key, row in world.effects.items() if row.worker == worker}
        return Holding(world.generations[worker], claims)

    async def disown(
        self, worker: WorkerId, *, generation: int, keep: Sequence[EffectId]
    ) -> int | None:
        world = self._world
        if worker not in world.workers or world.generations[worker] != generation:
            return None
        world.generations[worker] += 1
        for effect_id, row in self._world.effects.items():
            if row.worker == worker and effect_id not in keep:
                row.worker = None
        return world.generations[worker]

    async def gates(self, run_ids: Sequence[str]) -> Mapping[str, str]:
        world = self._world
        known = [run for run in run_ids if run in world.gates or run in world.holds]
        return {run: world.gate(run) for run in known}

    async def runs_of_newer(self, run_ids: Collection[str]) -> frozenset[str]:
        return frozenset(run for run in run_ids if self._world.deciders.get(run, 1) > self._decider)

    async def next_due_s(
        self, worker: WorkerId, *, lanes: Sequence[Lane], consumers: Sequence[ConsumerName]
    ) -> float | None:
        world = self._world
        due = [
            row.due_at
            for row in world.effects.values()
            if row.worker is None and row.new.effect.lane in lanes and row.new.consumer in consumers
        ]
        holders = {row.worker for row in world.effects.values()} - {None, worker}
        leases = [world.workers[other] for other in holders if other in world.workers]
        later = [(at - world.now).total_seconds() for at in (*due, *leases) if at > world.now]
        return min(later, default=None)

    async def has_unfinished(
        self, *, lanes: Sequence[Lane], consumers: Sequence[ConsumerName]
    ) -> bool:
        return any(
            row.new.effect.lane in lanes
            and row.new.consumer in consumers
            and self._may_work_on(row.new.effect.run_id)
            for row in self._world.effects.values()
        )

    def _may_work_on(self, run: str) -> bool:
        return self._world.gate(run) == "open" and self._world.deciders.get(run, 1) <= self._decider

    def _row_of(self, claimed: Claimed) -> turns.EffectRow | None:
        row = self._world.effects.get(claimed.id)
        return row if row is not None and row.epoch == claimed.epoch else None


def _claim_of(row: turns.EffectRow) -> Claimed:
    return replace(
        Claimed.from_new(row.new),
        epoch=row.epoch,
        attempts=row.attempts,
        crashes=row.crashes,
        spent=row.crashes > CRASH_LIMIT,
        size=row.size,
        wasted_s=row.wasted_s,
    )
