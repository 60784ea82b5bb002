"""The claims of this process: which effects it holds, how many more it may hold, and whether the
database agrees.

The answer to a claim can be lost, and so can the answer to a commit whose effects are born claimed. Then
the database says that this worker holds an effect which the worker does not know. No other worker can
take it while this worker's lease is live, so this worker has to find and release it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from infra.spine.ports.effects import Claimed, Effects, StaleGeneration
from infra.spine.postgres.errors import DatabaseUnavailable
from infra.spine.postgres.notify import Wakeup
from infra.spine.runtime.hosting import Hosting
from infra.spine.runtime.meter import Meter
from infra.task_cancellation import END_S, end
from schemas.effects.effect import Effect, Lane
from schemas.ids import EffectId

logger = logging.getLogger(__name__)

CHECK_S = 30.0
"""How often the claims that the database shows are compared with those that this process knows of, even
if nothing went wrong."""

MOST_WAITING = 256
"""How many effects of a process may wait without a place. Each holds its input in memory."""


class Claims:
    """The effects that this worker holds. A commit and a check each lock `changing`, because both change
    what this worker holds."""

    def __init__(self, hosting: Hosting, effects: Effects, wakeup: Wakeup, *, meter: Meter) -> None:
        self._hosting = hosting
        self._effects = effects
        self._wakeup = wakeup
        self._meter = meter
        self._performing = [c.name for c in hosting.consumers if c.perform is not None]
        self._held: dict[EffectId, Claimed] = {}
        self._tasks: dict[EffectId, asyncio.Task[None]] = {}
        self._waiting: set[tuple[EffectId, int]] = set()
        self._in_commit: dict[EffectId, Claimed] = {}
        self._taken: Counter[Lane] = Counter()
        self._reserved: Counter[Lane] = Counter()
        self._queued = set(hosting.lanes)
        self._generation = 0
        self._checked_at = 0.0
        self._reconnects_seen = 0
        self._claims_unverified = False
        self._is_closing = False
        self.changing = asyncio.Lock()

    # --- what is held ---------------------------------------------------------------------------

    @property
    def room(self) -> Mapping[Lane, int]:
        """How many places are free in each lane that has any."""
        return {lane: places for lane, places in self._free_places().items() if places > 0}

    def _free_places(self) -> Mapping[Lane, int]:
        """The free places of each lane that may take effects. Below 0, spare places are taken."""
        taken, spare = self._taken + self._reserved, self._hosting.spare
        left = {lane: self._hosting.places(lane) - taken[lane] for lane in self._hosting.lanes}
        return {lane: places for lane, places in left.items() if places + spare.get(lane, 0) > 0}

    def has_place(self, lane: Lane) -> bool:
        """Whether a place of a lane is free, perhaps a spare one."""
        return lane in self._free_places()

    @property
    def may_claim(self) -> bool:
        """Whether a lane with free places may have effects that are due and that nobody holds."""
        return not self._queued.isdisjoint(self.room)

    @property
    def tasks(self) -> Sequence[asyncio.Task[None]]:
        """The tasks that perform the held effects."""
        return list(self._tasks.values())

    def get_claim(self, effect: EffectId) -> Claimed | None:
        """Return the claim under which this process performs an effect, or None."""
        return self._held.get(effect)

    def is_given_up(self, claimed: Claimed) -> bool:
        """Whether this process no longer wants the outcome of a claim, because the claim was lost or
        released, or because the process is ending."""
        return self._is_closing or self._held.get(claimed.id) is not claimed

    def add(self, claimed: Claimed, task: asyncio.Task[None]) -> None:
        """Record that this process now performs an effect, in `task`."""
        self._held[claimed.id] = claimed
        self._taken[claimed.effect.lane] += claimed.size
        self._tasks[claimed.id] = task

    def forget(self, claimed: Claimed) -> None:
        """Drop this claim, but not a later one of the same effect."""
        if self._held.get(claimed.id) is claimed:
            del self._held[claimed.id], self._tasks[claimed.id]
            self._meter.end(claimed)
            if not self._end_wait(claimed):
                self._taken[claimed.effect.lane] -= claimed.size

    @contextmanager
    def waiting(self, claimed: Claimed) -> Iterator[None]:
        """Let an effect take no place while it only waits, unless too many wait already."""
        if len(self._waiting) < MOST_WAITING and not self.is_given_up(claimed):
            self._waiting.add((claimed.id, claimed.epoch))
            self._taken[claimed.effect.lane] -= claimed.size
            self._wakeup.set()
        self._meter.pause(claimed)
        try:
            yield
        finally:
            if self._end_wait(claimed):
                self._taken[claimed.effect.lane] += claimed.size
            self._meter.resume(claimed)

    def _end_wait(self, claimed: Claimed) -> bool:
        """Whether an effect waited without a place. From now on it does not."""
        key = (claimed.id, claimed.epoch)
        waited = key in self._waiting
        self._waiting.discard(key)
        return waited

    def begin_commit(self, finished: Iterable[Claimed]) -> None:
        """Record that the outcomes of these claims are being decided. No task performs them any more,
        but they are held until the commit."""
        self._in_commit = {claimed.id: claimed for claimed in finished}

    def end_commit(self) -> None:
        self._in_commit = {}

    # --- effects that are born claimed ----------------------------------------------------------

    def reserve(self, effect: Effect) -> bool:
        """Whether an effect that is decided here is born claimed by this process. If so, it takes up
        room from now on, although it is held only after the draft is committed. It is not born claimed
        while others may wait in its lane, because it would be performed before its turn. Nor is it in a
        lane with limits, because only a claim compares with them."""
        if not self._hosting.performs(effect) or effect.lane in self._queued:
            return False
        if self._hosting.is_limited(effect.lane):
            return False
        if effect.lane not in self.room:
            self._queued.add(effect.lane)
            return False
        self._reserved[effect.lane] += effect.size
        return True

    def drop_reservations(self, held: Iterable[Effect] = ()) -> None:
        """Forget the reservations, because the draft was given up, or was committed and these effects of
        it are `held`. If others may wait for a place that is free again, claim for it now."""
        for effect in held:
            self._reserved[effect.lane] -= effect.size
        unused = +self._reserved
        self._reserved.clear()
        if not self._queued.isdisjoint(unused):
            self._wakeup.set()

    # --- claiming -------------------------------------------------------------------------------

    async def claim(self) -> Sequence[Claimed]:
        """Claim and return effects for the places that are free. Returns none when this worker's
        generation is over, because then it does not know which effects it holds; the next check finds
        out."""
        left, room = self._free_places(), self.room
        lanes = set(self._hosting.lanes)
        if not left:
            self._queued = lanes
            return ()
        # Until the answer, what the last one told stays true: without it, nothing that is decided
        # meanwhile would be born claimed.
        self._queued |= lanes - set(room)
        try:
            claimed = await self._effects.claim(
                self._hosting.worker,
                room=left,
                consumers=self._performing,
                generation=self._generation,
                most=self._hosting.run_capacity,
                samples=self._hosting.workspace_samples,
                spare=self._hosting.spare,
            )
        except StaleGeneration as error:
            logger.warning("%s", error)
            self.distrust()
            self._queued = lanes
            return ()
        except BaseException:
            self._queued = lanes
            raise
        taken = Counter[Lane]()
        for each in claimed:
            taken[each.effect.lane] += each.size
        self._queued = lanes - {
            lane
            for lane, places in room.items()
            if taken[lane] < places and not self._hosting.is_limited(lane)
        }  # with a limit, more may wait although places are left
        return claimed

    async def next_due_s(self) -> float | None:
        """Return the seconds until more effects may become claimable, or None."""
        return await self._effects.next_due_s(
            self._hosting.worker, lanes=self._hosting.lanes, consumers=self._performing
        )

    async def has_unfinished(self) -> bool:
        """Whether there are effects that this process could perform now or later, including those that
        other workers hold."""
        return await self._effects.has_unfinished(
            lanes=self._hosting.lanes, consumers=self._performing
        )

    # --- whether the database agrees ------------------------------------------------------------

    def distrust(self) -> None:
        """Compare with the database now, because an answer or a write may be lost."""
        self._claims_unverified = True
        self._wakeup.set()

    async def verify(self) -> None:
        """Compare the claims in the database with those that this process knows. This happens after an
        answer was lost or the database was unavailable, and also from time to time without a cause.

        Claims that this process does not know are released, and effects whose claims are gone are ended.
        No claim and no commit is under way meanwhile. A claim that the network still delays belongs to
        an old generation and takes nothing.
        """
        unverified = self._claims_unverified or self._reconnects_seen != self._wakeup.absences
        if not unverified and time.monotonic() < self._checked_at + CHECK_S:
            return
        async with self.changing:
            self._claims_unverified, self._reconnects_seen = False, self._wakeup.absences
            holding = await self._effects.holding(self._hosting.worker)
            self._checked_at = time.monotonic()
            lost = self._forget_lost_claims(holding.claims)
            known = {**self._held, **self._in_commit}
            unknown = [str(effect) for effect in holding.claims if effect not in known]
            if unknown and not unverified:
                logger.error("claims that nobody here knew of are released: %s", unknown)
            if unknown or unverified:
                await self._release_unknown_claims(holding.generation, list(known))
        await end(lost)

    def _forget_lost_claims(self, ours: Mapping[EffectId, int]) -> list[asyncio.Task[None]]:
        """Forget the claims that are lost, because their outcomes would be refused. Returns the tasks to
        end."""
        lost = [held for held in self._held.values() if ours.get(held.id) != held.epoch]
        if lost:
            logger.warning("claims are lost: %s", [str(held.id) for held in lost])
        tasks = [self._tasks[held.id] for held in lost]
        for held in lost:
            self.forget(held)
        return tasks

    async def _release_unknown_claims(self, generation: int, known: Sequence[EffectId]) -> None:
        """Release everything but `known`, and begin a new generation."""
        begun = await self._effects.disown(self._hosting.worker, generation=generation, keep=known)
        if begun is None:
            # An earlier call of ours arrived late, in between: the next claim is refused, and then the
            # claims are compared again.
            self._claims_unverified = True
        else:
            self._generation = begun

    # --- giving up ------------------------------------------------------------------------------

    async def give_back(self, claimed: Claimed) -> None:
        """Give back an effect that was claimed although its place has been taken meanwhile. It waits in
        its lane again."""
        self._queued.add(claimed.effect.lane)
        await self._effects.release(claimed)

    async def release(self, claimed: Claimed) -> None:
        """End the task that performs an effect, and give the effect back without counting an attempt."""
        task = self._tasks.get(claimed.id)
        wasted_s = self._meter.end(claimed)
        self.forget(claimed)
        if task is not None:
            await end([task])
        try:
            await self._effects.release(claimed, wasted_s=wasted_s)
        except DatabaseUnavailable:
            self.distrust()
        self._wakeup.set()

    async def release_closed(self) -> None:
        """Release the effects whose run is no longer open. If the database is unavailable, the next call
        tries again."""
        runs = {claimed.effect.run_id for claimed in self._held.values()}
        if not runs:
            return
        try:
            gates = await self._effects.gates(sorted(runs))
        except DatabaseUnavailable:
            return
        for claimed in list(self._held.values()):
            if gates.get(claimed.effect.run_id, "open") != "open":
                await self.release(claimed)

    def close(self) -> None:
        """Give all claims up: from now on, the tasks that perform them may be cancelled."""
        self._is_closing = True

    async def release_all(self) -> None:
        """Release everything, within a deadline. A claim that is not released by then is taken over when
        this worker's lease ends."""
        # Use new tasks, because this task may have been cancelled and could then send no query.
        releases = [asyncio.ensure_future(self.release(held)) for held in self._held.values()]
        if releases:
            await asyncio.wait(releases, timeout=END_S)
