"""THE runtime: two loops and one way to commit. The numbers are the crash points of the tests.

Intake (bus -> decisions)                     Perform (effect -> outcome), never in the intake loop
1 received: a batch arrived                   1 claimed: effects of our lanes, under epochs
2-4 decided: read, fold, handle, cascade      2 effect_done: `perform` returned or failed as data
5 commit: one call, whole or not at all       3 handle the outcome, cascade, commit with the fence
6 offsets: the bus may forget the batch       4 retry later, or give up with an outcome Failed

Every commit of this process goes through `_settle`, one at a time: outcomes that become ready while a
commit is under way share the next one.
"""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from infra import failpoints
from infra.artifacts import ArtifactStore
from infra.consumer import Consumer
from infra.draft import DecisionError, Draft, Drafter, Work
from infra.notify import Wakeup
from infra.performing import Performing, perform_once
from infra.poison import dead_letter
from infra.ports import (
    Bus,
    Claimed,
    CommitMiss,
    Effects,
    EventLog,
    Ports,
    Recorded,
)
from infra.states import States
from schemas.envelope import BadEvent
from schemas.ids import ConsumerName, EffectId, WorkerId
from schemas.messages import Effect, Lane

logger = logging.getLogger(__name__)

SLOW_POLL_S = 5.0
"""How long the perform loop sleeps when nothing wakes it; a lost wake-up costs this much."""

HANDLE_TRIES = 3
"""How often a message whose `handle` raises is tried before it is a dead letter."""


@dataclass(frozen=True, slots=True)
class Hosting:
    """What a process hosts: its consumers, its lanes, and how many effects it holds at once."""

    worker: WorkerId
    consumers: tuple[Consumer[Any], ...]
    lanes: tuple[Lane, ...]
    capacity: int = 1024

    def performs(self, effect: Effect) -> bool:
        return effect.lane in self.lanes and any(
            type(effect) in consumer.effects for consumer in self.consumers
        )


class Runtime:
    """Hosts consumers: decides, commits, performs, until stopped."""

    def __init__(
        self,
        hosting: Hosting,
        *,
        log: EventLog,
        effects: Effects,
        bus: Bus,
        ports: Ports,
        artifacts: ArtifactStore,
        wakeup: Wakeup,
    ) -> None:
        self._hosting = hosting
        self._log = log
        self._effects = effects
        self._bus = bus
        self._ports = ports
        self._artifacts = artifacts
        self._states = States(log)
        self._drafter = Drafter(
            hosting.consumers, self._states, now=ports.clock.now, claims=self._claims
        )
        self._by_name = {consumer.name: consumer for consumer in hosting.consumers}
        self._settling = asyncio.Lock()
        self._wake = wakeup
        self._held: dict[EffectId, asyncio.Task[None]] = {}
        self._runs: dict[EffectId, Claimed] = {}
        self._outcomes: asyncio.Queue[Performing] = asyncio.Queue()
        self._stopping = asyncio.Event()
        self.commits = 0

    async def run(self, *, drain: bool = False) -> None:
        """Work until `stop`, or with `drain` until nothing is left to do. Raises what a loop raised."""
        loops = [self._intake(), self._perform(), self._settle_outcomes(), self._stopping.wait()]
        if drain:
            loops.append(self._drained())
        tasks = [asyncio.ensure_future(loop) for loop in loops]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._end(tasks)
        for task in done:
            task.result()

    def stop(self) -> None:
        """Finish nothing more; effects in flight are given back without counting an attempt."""
        self._stopping.set()

    async def apply_gates(self) -> None:
        """Give up the effects whose run is no longer open (called with each heartbeat)."""
        runs = {claimed.effect.run_id for claimed in self._runs.values()}
        if not runs:
            return
        gates = await self._effects.gates(sorted(runs))
        for effect_id, claimed in list(self._runs.items()):
            if gates.get(claimed.effect.run_id, "open") != "open":
                await self._give_back(effect_id, claimed)

    # --- intake ---------------------------------------------------------------------------------

    async def _intake(self) -> None:
        reads = {c.name: [event.type for event in c.reads] for c in self._hosting.consumers}
        async with aclosing(self._bus.subscribe(reads)) as batches:
            async for batch in batches:
                await self._take(batch)

    async def _take(self, batch: Sequence[tuple[ConsumerName, Recorded]]) -> None:
        works = [work for name, recorded in batch if (work := await self._work(name, recorded))]
        for name in {work.consumer.name for work in works}:
            failpoints.hit(f"{name}.intake.received")
        await self._settle(works)
        await self._bus.acknowledge(batch)
        for name in {work.consumer.name for work in works}:
            failpoints.hit(f"{name}.intake.offset_committed")

    async def _work(self, name: ConsumerName, recorded: Recorded) -> Work | None:
        """What a record asks of a consumer. One that cannot be decoded is a dead letter, and nothing
        waits for it; its type is one that the consumer reads, so it was meant for it."""
        try:
            event = recorded.event
        except BadEvent as error:
            logger.warning("%s %s: %s", name, recorded.id, error)
            await dead_letter(self._log, name, recorded, str(error))
            return None
        self._states.observe(recorded)
        consumer = self._by_name[name]
        if not consumer.routes(event):
            return None
        return Work(
            consumer=consumer,
            message=event,
            id=recorded.id,
            correlation=recorded.correlation,
            traceparent=recorded.traceparent,
            recorded=recorded,
        )

    # --- the only way to commit -----------------------------------------------------------------

    async def _settle(self, works: Sequence[Work]) -> None:
        """Decide on these messages and write it; on a miss read again, without limit."""
        tries = 0
        apart: frozenset[tuple[ConsumerName, UUID]] = frozenset()
        async with self._settling:
            while works:
                try:
                    draft = await self._drafter.draft(works, without=apart)
                except DecisionError as error:
                    if error.work.id not in {work.id for work in works}:
                        # It came up in the cascade: let the bus bring it, by itself.
                        apart |= {(error.work.consumer.name, error.work.id)}
                        continue
                    works = await self._isolate(works, error)
                    continue
                self._pass(draft, "decided")
                self._pass(draft, "tx_before_commit")
                try:
                    await self._log.commit(draft.commit(self._hosting.worker))
                except CommitMiss as miss:
                    self._states.forget(draft.states)
                    works = await self._still_due(works, miss)
                    tries += 1
                    await asyncio.sleep(random.uniform(0, min(0.05, 0.001 * 2**tries)))  # noqa: S311 - jitter
                    continue
                self._pass(draft, "tx_after_commit")
                self._committed(draft)
                return

    def _committed(self, draft: Draft) -> None:
        self.commits += 1
        self._states.remember(draft.states)
        for new in draft.effects:
            if new.claimed:
                self._start(
                    Claimed(
                        id=new.effect.id,
                        effect=new.effect,
                        consumer=new.consumer,
                        stream=new.stream,
                        epoch=1,
                        attempts=0,
                        crashes=0,
                        correlation=new.correlation,
                        traceparent=new.traceparent,
                    )
                )
        self._wake.set()

    async def _still_due(self, works: Sequence[Work], miss: CommitMiss) -> list[Work]:
        """The works that a miss did not settle: not consumed elsewhere, not fenced."""
        messages = [(work.consumer.name, work.recorded) for work in works if work.recorded]
        due = {(name, recorded.id) for name, recorded in await self._log.due(messages)}
        return [
            work
            for work in works
            if (work.recorded is None or (work.consumer.name, work.id) in due)
            and not (miss.kind == "fenced" and work.claimed and str(work.claimed.id) == miss.what)
        ]

    async def _isolate(self, works: Sequence[Work], error: DecisionError) -> list[Work]:
        """One message makes its decider raise: try it alone some times, then put it into the dead
        letters (an event) or let its effect be tried later (an outcome). Returns the others."""
        logger.exception("%s", error, exc_info=error)
        culprit = error.work
        for _ in range(HANDLE_TRIES - 1):
            self._states.forget(culprit.streams)
            try:
                await self._drafter.draft([culprit])
            except DecisionError:
                continue
            return list(works)
        if culprit.claimed is not None:
            await self._effects.retry(culprit.claimed, delay_s=5.0, error=str(error))
        if culprit.recorded is not None:
            await dead_letter(self._log, culprit.consumer.name, culprit.recorded, str(error))
        return [work for work in works if work.id != culprit.id]

    def _pass(self, draft: Draft, step: str) -> None:
        """Failpoints of every consumer that is in this commit."""
        for name in draft.intake:
            failpoints.hit(f"{name}.intake.{step}")
        if step == "decided":
            return
        for name, effect_type in draft.performed:
            failpoints.hit(f"{name}.perform.{effect_type}.{step}")

    # --- perform --------------------------------------------------------------------------------

    def _claims(self, effect: Effect) -> bool:
        """Whether an effect decided here is born claimed by this process."""
        return self._hosting.performs(effect) and len(self._held) < self._hosting.capacity

    async def _perform(self) -> None:
        names = [c.name for c in self._hosting.consumers if c.perform is not None]
        while True:
            room = self._hosting.capacity - len(self._held)
            claimed = (
                await self._effects.claim(
                    self._hosting.worker,
                    lanes=self._hosting.lanes,
                    consumers=names,
                    limit=room,
                )
                if room > 0
                else ()
            )
            for one in claimed:
                self._start(one)
            if not claimed:
                await self._rest()

    async def _rest(self) -> None:
        due = await self._effects.next_due_s(lanes=self._hosting.lanes)
        wait = SLOW_POLL_S if due is None else max(0.01, min(due, SLOW_POLL_S))
        await self._wake.wait(wait)

    def _start(self, claimed: Claimed) -> None:
        if claimed.id in self._held:
            return
        failpoints.hit(f"{claimed.consumer}.perform.{claimed.effect.type}.claimed")
        self._runs[claimed.id] = claimed
        self._held[claimed.id] = asyncio.ensure_future(self._one(claimed))

    async def _one(self, claimed: Claimed) -> None:
        consumer = self._by_name[claimed.consumer]
        staged = self._artifacts.stage()
        began = time.monotonic()
        done = await perform_once(consumer, claimed, replace(self._ports, artifacts=staged))
        seconds = round(time.monotonic() - began, 4)
        failpoints.hit(f"{claimed.consumer}.perform.{claimed.effect.type}.effect_done")
        if done.outcome is None:
            self._forget(claimed)
            await self._effects.retry(claimed, delay_s=done.retry_in_s, error=done.error or "")
            self._wake.set()
            return
        await self._outcomes.put(replace(done, artifacts=staged.pending, seconds=seconds))

    async def _settle_outcomes(self) -> None:
        while True:
            ready = [await self._outcomes.get()]
            # Outcomes of effects that were performed as one batch become ready in one turn of the
            # event loop: let them all arrive, so that they share the commit.
            await asyncio.sleep(0)
            while not self._outcomes.empty():
                ready.append(self._outcomes.get_nowait())
            works = [
                Work(
                    consumer=self._by_name[done.claimed.consumer],
                    message=done.outcome,
                    id=done.claimed.id,
                    correlation=done.claimed.correlation,
                    traceparent=done.claimed.traceparent,
                    claimed=done.claimed,
                    artifacts=done.artifacts,
                    seconds=done.seconds,
                )
                for done in ready
                if done.outcome is not None and done.claimed.id in self._held
            ]
            for done in ready:
                self._forget(done.claimed)
            await self._settle(works)

    def _forget(self, claimed: Claimed) -> None:
        self._held.pop(claimed.id, None)
        self._runs.pop(claimed.id, None)

    async def _give_back(self, effect_id: EffectId, claimed: Claimed) -> None:
        task = self._held.pop(effect_id, None)
        self._runs.pop(effect_id, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._effects.release(claimed)

    # --- the end --------------------------------------------------------------------------------

    async def _drained(self) -> None:
        """Returns once the bus is idle and no effect of our lanes waits or is held."""
        while True:
            await asyncio.sleep(0.05)
            depth = await self._effects.depth()
            busy = any(depth.get(lane, 0) for lane in self._hosting.lanes)
            if not busy and not self._held and await self._bus.idle():
                return

    async def _end(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for effect_id, claimed in list(self._runs.items()):
            await self._give_back(effect_id, claimed)
