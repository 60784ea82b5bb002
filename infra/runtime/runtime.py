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
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from infra import failpoints, telemetry
from infra.blobs.artifacts import ArtifactStore
from infra.ports.bus import Bus
from infra.ports.clock import LogTime
from infra.ports.effects import Claimed, Disowned, Effects
from infra.ports.event_log import Commit, CommitMiss, CommitRefused, EventLog, Recorded
from infra.ports.ports import Ports
from infra.postgres.codec import Unwritable
from infra.postgres.errors import DatabaseUnavailable, reconnecting
from infra.postgres.history import as_of
from infra.postgres.notify import Wakeup
from infra.runtime.attempt import Performing, perform_once
from infra.runtime.cascade import Apart, DecisionError, Draft, Drafter, DraftRefused, Work
from infra.runtime.folded_states import States
from infra.runtime.hosting import Hosting
from infra.runtime.quarantine import Batch, Isolation
from infra.task_cancellation import END_S, end, go_on
from schemas.effects import Effect
from schemas.events import MessageRedriven
from schemas.ids import ConsumerName, EffectId
from schemas.text import said

logger = logging.getLogger(__name__)

SLOW_POLL_S = 5.0
"""How long the perform loop sleeps when nothing wakes it; a lost wake-up costs this much. Nobody tells
when somebody gives an effect back, or ends a lease before its time."""

AWAY_S = 0.2
"""The pause before a database that was away is asked again."""

CHECK_S = 30.0
"""How often what the database says is ours is held against what is in hand, though all seems well."""

Problem = DecisionError | CommitMiss | DraftRefused
"""Why a batch was not written, and what must be looked at before it is tried again."""


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
        self._time = LogTime(ports.clock)
        self._drafter = Drafter(
            hosting.consumers, self._states, now=self._time.now, claims=self._claims
        )
        self._isolation = Isolation(log, effects, self._states, self._drafter)
        self._by_name = {consumer.name: consumer for consumer in hosting.consumers}
        self._performing = [c.name for c in hosting.consumers if c.perform is not None]
        self._settling = asyncio.Lock()
        self._wake = wakeup
        self._held: dict[EffectId, asyncio.Task[None]] = {}
        self._runs: dict[EffectId, Claimed] = {}
        self._outcomes: asyncio.Queue[Performing] = asyncio.Queue()
        self._deciding: dict[EffectId, Claimed] = {}
        self._generation = 0
        self._checked_at = 0.0
        self._full = False
        self._born = 0
        self._unsure = False
        self._turn = log.turns
        self._absences = 0
        self._stopping = asyncio.Event()
        self.commits = 0

    async def run(self, *, drain: bool = False) -> None:
        """Work until `stop`, or with `drain` until nothing is left to do. Raises what a loop raised."""
        loops = [self._intake, self._perform, self._settle_outcomes]
        if drain:
            loops.append(self._drained)
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(reconnecting(e)) for e in loops]
        tasks.append(asyncio.ensure_future(self._stopping.wait()))
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
        """Give up the effects whose run is no longer open (called with each heartbeat). A database that
        is away is asked at the next one."""
        runs = {claimed.effect.run_id for claimed in self._runs.values()}
        if not runs:
            return
        try:
            gates = await self._effects.gates(sorted(runs))
        except DatabaseUnavailable:
            return
        for claimed in list(self._runs.values()):
            if gates.get(claimed.effect.run_id, "open") != "open":
                await self._give_back(claimed)

    # --- intake ---------------------------------------------------------------------------------

    async def _intake(self) -> None:
        reads = {
            c.name: [*(event.type for event in c.reads), MessageRedriven.type]
            for c in self._hosting.consumers
        }
        self._time.told(await self._log.clock_time())
        async with aclosing(self._bus.subscribe(reads)) as batches:
            async for batch in batches:
                await self._take(batch)

    async def _take(self, batch: Sequence[tuple[ConsumerName, Recorded]]) -> None:
        read = [await self._isolation.read(self._by_name[name], r) for name, r in batch]
        works = [work for work in read if work is not None]
        names = {work.consumer.name for work in works}
        for name in names:
            failpoints.hit(f"{name}.intake.received")
        await self._settle(works)
        await self._bus.acknowledge(batch)
        for name in names:
            failpoints.hit(f"{name}.intake.offset_committed")

    # --- the only way to commit -----------------------------------------------------------------

    async def _settle(self, works: Sequence[Work]) -> None:
        """Decide on these messages and write it, under a span that they link to and that all that
        follows links to."""
        if not works:
            return
        names = "+".join(dict.fromkeys(work.consumer.name for work in works))
        links = [work.traceparent for work in works]
        with telemetry.span(telemetry.DECIDE.format(consumers=names), links=links) as context:
            if context is not None:
                works = [replace(work, traceparent=context) for work in works]
            await self._commit(works)

    async def _commit(self, works: Sequence[Work]) -> None:
        """Decide, commit; on a miss read again, without limit. A database that is away is waited for:
        whether it took the write is seen when it is written again."""
        tries = 0
        batches: list[Batch] = [(works, frozenset())]
        problem: Problem | None = None
        async with self._settling:
            while batches:
                go_on()
                try:
                    if problem is None:
                        await self._write(*batches[0])
                        del batches[0]
                        continue
                    solved = await self._solved(*batches[0], problem)
                    batches[:1] = [batch for batch in solved if batch[0]]
                    problem = None
                except (DecisionError, CommitMiss, DraftRefused) as error:
                    problem = error
                except DatabaseUnavailable as error:
                    self._unsure = True
                    logger.warning("a decision waits: %s", error)
                    await asyncio.sleep(AWAY_S)
                tries += 1
                await asyncio.sleep(random.uniform(0, min(0.05, 0.001 * 2 ** min(tries, 6))))  # noqa: S311 - jitter
            self._born = 0

    async def _write(self, works: Sequence[Work], apart: Apart) -> None:
        self._born = 0
        if self._turn != self._log.turns:
            self._states.clear()
            self._turn, self._unsure = self._log.turns, True
        with as_of(self._turn):
            draft = await self._drafter.draft(works, without=apart)
        self._pass(draft, "decided")
        self._pass(draft, "tx_before_commit")
        commit = draft.commit(self._hosting.worker)
        try:
            with as_of(self._turn):
                recorded = await self._log.commit(commit)
        except Unwritable as error:
            raise draft.unwritable(error) from error
        except CommitRefused as error:
            self._states.forget(draft.states)
            raise draft.refused(error) from error
        except (CommitMiss, DatabaseUnavailable):
            self._states.forget(draft.states)
            raise
        self._pass(draft, "tx_after_commit")
        if recorded:
            self._time.told(recorded[-1].time)
        self._committed(draft, commit)
        await self._states.keep(draft.owners)

    async def _solved(
        self, works: Sequence[Work], apart: Apart, problem: Problem
    ) -> Sequence[Batch]:
        """What is left to decide on, together, and what is left to the bus, after a problem."""
        if isinstance(problem, CommitMiss):
            return [(await self._still_due(works, problem), apart)]
        if isinstance(problem, DraftRefused):
            return await self._isolation.parted(works, apart, problem)
        culprit = problem.work
        if culprit.id not in {work.id for work in works}:
            # It came up in the cascade: let the bus bring it, by itself.
            return [(works, apart | {(culprit.consumer.name, culprit.id)})]
        return [(left, apart) for left in await self._isolation.without(works, problem)]

    def _committed(self, draft: Draft, commit: Commit) -> None:
        self.commits += 1
        self._states.remember(draft.states)
        for new in draft.effects:
            if new.claimed:
                self._start(Claimed.born(new))
        if commit.asks or (commit.finished and self._full):
            self._wake.set()

    async def _still_due(self, works: Sequence[Work], miss: CommitMiss) -> list[Work]:
        """The works that a miss did not settle: not consumed elsewhere, not fenced."""
        messages = [(work.consumer.name, work.delivered) for work in works if work.delivered]
        due = {(name, recorded.id) for name, recorded in await self._log.unconsumed(messages)}
        fenced = miss.what if miss.kind == "fenced" else None
        self._unsure |= fenced is not None
        return [
            work
            for work in works
            if (work.delivered is None or (work.consumer.name, work.delivered.id) in due)
            and not (work.claimed and str(work.claimed.id) == fenced)
        ]

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
        """Whether an effect decided here is born claimed by this process. What the same draft has
        claimed before it is in nobody's hands yet, and counts."""
        if not self._hosting.performs(effect) or self._room() <= 0:
            return False
        self._born += 1
        return True

    def _room(self) -> int:
        """How many more effects this process may hold."""
        return self._hosting.capacity - len(self._held) - self._born

    async def _perform(self) -> None:
        self._unsure = True  # we start, or start again because an answer was lost
        while True:
            go_on()
            await self._check()
            room = self._room()
            claimed = await self._claimed(room)
            # What was born claimed meanwhile took its part of the room.
            left = max(0, self._room())
            # Whether more may wait than we have room for: then it is claimed as room comes.
            self._full = len(claimed) >= min(room, left)
            for one in claimed[:left]:
                self._start(one)
            for one in claimed[left:]:
                await self._effects.release(one)
            if not claimed:
                await self._rest()

    async def _claimed(self, room: int) -> Sequence[Claimed]:
        """New claims, at most `room`. None when another generation of ours holds them: then we do not
        know what is ours."""
        if room <= 0:
            return ()
        try:
            return await self._effects.claim(
                self._hosting.worker,
                lanes=self._hosting.lanes,
                consumers=self._performing,
                limit=room,
                generation=self._generation,
            )
        except Disowned as error:
            logger.warning("%s", error)
            self._unsure = True
            return ()

    async def _check(self) -> None:
        """After an answer was lost, or what we last wrote, and now and then without any reason: what the
        database says is ours and is not in hand is given back, for nobody else could take it while our
        lease lives; what is in hand and not ours ends. No claim and no commit is under way meanwhile;
        what is still on its way through a network comes under an old generation, and takes nothing."""
        unsure = self._unsure or self._absences != self._wake.absences
        if not unsure and time.monotonic() < self._checked_at + CHECK_S:
            return
        async with self._settling:
            self._unsure, self._absences = False, self._wake.absences
            holding = await self._effects.holding(self._hosting.worker)
            self._checked_at = time.monotonic()
            lost = self._lost(holding.claims)
            keep = {**self._runs, **self._deciding}
            unknown = [str(found) for found in holding.claims if found not in keep]
            if unknown and not unsure:
                logger.error("claims that nobody here knew of are given back: %s", unknown)
            if unknown or unsure:
                generation = await self._effects.disown(
                    self._hosting.worker, generation=holding.generation, keep=list(keep)
                )
                if generation is None:
                    self._unsure = True  # another call of ours came in between, late
                else:
                    self._generation = generation
        await end(lost)

    def _lost(self, ours: Mapping[EffectId, int]) -> list[asyncio.Task[None]]:
        """Forget what is in hand under claims that are lost, for their outcomes would be refused;
        returns what is to end."""
        lost = [held for held in self._runs.values() if ours.get(held.id) != held.epoch]
        if lost:
            logger.warning("claims are lost: %s", [str(held.id) for held in lost])
        tasks = [self._held[held.id] for held in lost]
        for held in lost:
            self._forget(held)
        return tasks

    async def _rest(self) -> None:
        due = await self._effects.next_due_s(
            self._hosting.worker, lanes=self._hosting.lanes, consumers=self._performing
        )
        wait = SLOW_POLL_S if due is None else max(0.01, min(due, SLOW_POLL_S))
        await self._wake.wait(wait)

    def _start(self, claimed: Claimed) -> None:
        if (held := self._runs.get(claimed.id)) is not None:
            self._unsure |= held.epoch != claimed.epoch
            return
        failpoints.hit(f"{claimed.consumer}.perform.{claimed.effect.type}.claimed")
        self._runs[claimed.id] = claimed
        self._held[claimed.id] = asyncio.ensure_future(self._one(claimed))

    async def _one(self, claimed: Claimed) -> None:
        """Perform an effect and hand its outcome on. Whatever goes wrong beside the attempt itself, the
        effect is given back: nobody awaits this task, and nobody else may take what is ours."""
        try:
            done = await self._attempt(claimed)
            go_on()
        except Exception as error:
            logger.exception("%s could not be carried out", claimed.effect.type)
            done = Performing(
                claimed, None, retry_in_s=SLOW_POLL_S, error=said(error), counted=False
            )
        if done.outcome is None:
            await self._try_later(done)
        else:
            await self._outcomes.put(done)

    async def _attempt(self, claimed: Claimed) -> Performing:
        consumer = self._by_name[claimed.consumer]
        staged = self._artifacts.stage()
        began = time.monotonic()
        name = telemetry.PERFORM.format(consumer=consumer.name, effect=claimed.effect.type)
        with telemetry.span(name, links=[claimed.traceparent]) as context:
            done = await perform_once(consumer, claimed, replace(self._ports, artifacts=staged))
        done = replace(
            done,
            artifacts=staged.pending,
            seconds=round(time.monotonic() - began, 4),
            traceparent=context or claimed.traceparent,
        )
        failpoints.hit(f"{claimed.consumer}.perform.{claimed.effect.type}.effect_done")
        return done

    async def _try_later(self, done: Performing) -> None:
        """Give the effect back; a database that was away is not the attempt's fault. What cannot be
        given back is found by the check."""
        try:
            if done.away:
                await self._effects.release(done.claimed)
            else:
                await self._effects.retry(
                    done.claimed,
                    delay_s=done.retry_in_s,
                    error=done.error or "",
                    counted=done.counted,
                )
        except DatabaseUnavailable:
            self._unsure = True
        except Exception:
            logger.exception("%s could not be given back", done.claimed.effect.type)
            await asyncio.sleep(SLOW_POLL_S)
            self._unsure = True
        finally:
            self._forget(done.claimed)
        self._wake.set()

    async def _settle_outcomes(self) -> None:
        while True:
            go_on()
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
                    traceparent=done.traceparent,
                    claimed=done.claimed,
                    artifacts=done.artifacts,
                    seconds=done.seconds,
                )
                for done in ready
                if done.outcome is not None and self._runs.get(done.claimed.id) is done.claimed
            ]
            self._deciding = {work.claimed.id: work.claimed for work in works if work.claimed}
            for done in ready:
                self._forget(done.claimed)
            await self._settle(works)
            self._deciding = {}

    def _forget(self, claimed: Claimed) -> None:
        """This claim; not a later one of the same effect."""
        if self._runs.get(claimed.id) is claimed:
            del self._runs[claimed.id], self._held[claimed.id]

    async def _give_back(self, claimed: Claimed) -> None:
        task = self._held.get(claimed.id)
        self._forget(claimed)
        if task is not None:
            await end([task])
        try:
            await self._effects.release(claimed)
        except DatabaseUnavailable:
            self._unsure = True

    # --- the end --------------------------------------------------------------------------------

    async def _drained(self) -> None:
        """Returns once the bus is idle and nothing is left that we might perform: no effect of our
        consumers whose run is open, also when it is tried again later or another worker has it,
        for its outcome or its lease's end may bring us more."""
        while True:
            await asyncio.sleep(0.05)
            left = await self._effects.left(lanes=self._hosting.lanes, consumers=self._performing)
            if not left and not self._held and await self._bus.idle():
                return

    async def _end(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        """Everything here has a deadline: what is not given back is taken up when our lease ends."""
        await end([*tasks, *self._held.values()])
        # In tasks of their own: this one may have been told to end, and would ask nothing any more.
        giving = [asyncio.ensure_future(self._give_back(c)) for c in self._runs.values()]
        if giving:
            await asyncio.wait(giving, timeout=END_S)
