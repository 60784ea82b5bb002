"""Performs effects: claims them, runs each in a task of its own, and hands the outcomes on.

The long work happens here, under a lease and outside of any loop that decides. `attempt.py` classifies
how an attempt ends. The intake and the committer decide on its outcome.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from infra import failpoints, telemetry
from infra.spine.ports.artifacts import ArtifactStage
from infra.spine.ports.effects import Claimed, Effects
from infra.spine.postgres.errors import DatabaseUnavailable
from infra.spine.postgres.notify import Wakeup
from infra.spine.runtime.attempt import Attempt, perform_once, retry_or_fail
from infra.spine.runtime.claims import Claims
from infra.spine.runtime.consumer import PortsOf
from infra.spine.runtime.hosting import Hosting
from infra.spine.runtime.meter import Meter
from infra.spine.runtime.places import perform_with
from infra.task_cancellation import forget_cancellations, go_on
from schemas.costs.work import Work
from schemas.text import describe_error

logger = logging.getLogger(__name__)

SLOW_POLL_S = 5.0
"""How long the performer sleeps when nothing wakes it. A lost wake-up costs this much. No wake-up is
sent when somebody releases an effect, or ends a lease before its time."""


SOON_S = 0.02
"""How long the performer waits to be woken before it asks the database when more is due."""

AGAIN_S = 0.25
"""How long the performer sleeps after a claim that left places free. What became due since is claimed
then."""


class StrayCancellation(Exception):
    """The task that performs an effect was cancelled, but this process did not give the effect up. The
    effect is tried again, like after any other error."""

    def __init__(self) -> None:
        super().__init__(
            "its work was cancelled, and not by a shutdown, a lost claim or a closed run"
        )


class Performer:
    """Claims and performs the effects of this process's lanes."""

    def __init__(
        self,
        hosting: Hosting,
        *,
        claims: Claims,
        meter: Meter,
        effects: Effects,
        ports: PortsOf,
        artifacts: ArtifactStage,
        wakeup: Wakeup,
    ) -> None:
        self._consumers = {consumer.name: consumer for consumer in hosting.consumers}
        self._claims = claims
        self._meter = meter
        self._effects = effects
        self._ports = ports
        self._artifacts = artifacts
        self._wakeup = wakeup
        self._finished: asyncio.Queue[Attempt] = asyncio.Queue()

    async def run(self) -> None:
        """Claim effects and start them, without end."""
        self._claims.distrust()  # this is the start, or a restart because an answer was lost
        while True:
            go_on()
            await self._claims.verify()
            found = await self._claim_and_start()
            if not (found and self._claims.may_claim):
                await self._wait_for_work(AGAIN_S if found else SLOW_POLL_S)

    def start(self, claimed: Claimed) -> None:
        """Perform an effect that this process has just claimed, in a task of its own."""
        if (held := self._claims.get_claim(claimed.id)) is not None:
            if held.epoch != claimed.epoch:
                self._claims.distrust()
            return
        # 1 claimed: an effect of our lanes, under an epoch
        failpoints.hit(f"{claimed.consumer}.perform.{claimed.effect.type}.claimed")
        self._claims.add(claimed, asyncio.ensure_future(self._perform_effect(claimed)))

    def wake(self) -> None:
        """Claim now, without waiting for the next poll."""
        self._wakeup.set()

    async def take_finished(self) -> Sequence[Attempt]:
        """Wait for the first attempt with an outcome. Returns all attempts that have one."""
        finished = [await self._finished.get()]
        # Outcomes of effects that were performed as one batch become ready in one iteration of the
        # event loop. Let them all arrive, so that they share the commit.
        await asyncio.sleep(0)
        while not self._finished.empty():
            finished.append(self._finished.get_nowait())
        return finished

    async def _claim_and_start(self) -> bool:
        """Claim effects and start them. Returns whether any were claimed."""
        claimed = await self._claims.claim()
        for each in claimed:
            # Effects that were born claimed meanwhile may have taken the room.
            if self._claims.has_place(each.effect.lane):
                self.start(each)
            else:
                await self._claims.give_back(each)
        return bool(claimed)

    async def _wait_for_work(self, most_s: float) -> None:
        """Wait until an effect may be due. A process with much to do is woken again at once, and does
        not ask when the next one is due."""
        if await self._wakeup.wait(SOON_S):
            return
        due_s = await self._claims.next_due_s()
        wait_s = most_s if due_s is None else max(0.01, min(due_s, most_s))
        await self._wakeup.wait(wait_s)

    async def _perform_effect(self, claimed: Claimed) -> None:
        """Perform an effect and hand its outcome on. If anything but the attempt itself fails, the
        effect is released, because nobody awaits this task and no other worker may take the effect."""
        try:
            attempt = await self._make_attempt(claimed)
        except asyncio.CancelledError:
            if self._claims.is_given_up(claimed):
                raise
            attempt = retry_or_fail(claimed, StrayCancellation())
        except Exception as error:  # nobody awaits this task
            logger.exception("%s could not be performed", claimed.effect.type)
            attempt = Attempt(
                claimed, None, retry_in_s=SLOW_POLL_S, error=describe_error(error), counted=False
            )
        if self._claims.is_given_up(claimed):
            go_on()
        elif stray := forget_cancellations():
            # The effect is still ours, so its outcome counts.
            logger.error("%s was cancelled %d times by nobody", claimed.effect.type, stray)
        if attempt.outcome is None:
            # 4 retry later (`perform_once` gives up with the outcome Failed after the last attempt)
            await self._retry(attempt)
        else:
            # 3 the intake handles the outcome, and commits it with the fence
            await self._finished.put(attempt)

    async def _make_attempt(self, claimed: Claimed) -> Attempt:
        consumer = self._consumers[claimed.consumer]
        staged = self._artifacts.stage()
        perform_with(partial(self._claims.waiting, claimed))
        self._meter.begin(claimed)
        began = time.monotonic()
        name = telemetry.PERFORM.format(consumer=consumer.name, effect=claimed.effect.type)
        with telemetry.span(name, links=[claimed.traceparent]) as context:
            attempt = await perform_once(consumer, claimed, self._ports(consumer, staged))
        attempt = replace(
            attempt,
            artifacts=tuple(staged.pending),
            seconds=round(time.monotonic() - began, 4),
            work=self._end_measuring(claimed),
            traceparent=context or claimed.traceparent,
        )
        # 2 effect_done: `perform` returned, or failed as data
        failpoints.hit(f"{claimed.consumer}.perform.{claimed.effect.type}.effect_done")
        return attempt

    def _end_measuring(self, claimed: Claimed) -> Work:
        return Work(
            effect=claimed.effect.type,
            device=self._meter.device_of(claimed.effect.lane),
            device_s=self._meter.end(claimed),
            wasted_s=claimed.wasted_s,
        )

    async def _retry(self, attempt: Attempt) -> None:
        """Give the effect back for later. An unavailable database does not count against the attempt. If
        the effect cannot be given back now, the next check of the claims finds it."""
        wasted_s = attempt.work.device_s if attempt.work else self._meter.end(attempt.claimed)
        try:
            if attempt.no_database:
                await self._effects.release(attempt.claimed, wasted_s=wasted_s)
            else:
                await self._effects.retry(
                    attempt.claimed,
                    delay_s=attempt.retry_in_s,
                    error=attempt.error or "",
                    counted=attempt.counted,
                    wasted_s=wasted_s,
                )
        except DatabaseUnavailable:
            self._claims.distrust()
        except Exception:  # nobody awaits this task
            logger.exception("%s could not be given back", attempt.claimed.effect.type)
            await asyncio.sleep(SLOW_POLL_S)
            self._claims.distrust()
        finally:
            self._claims.forget(attempt.claimed)
        self._wakeup.set()
