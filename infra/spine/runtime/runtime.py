"""The runtime, which hosts consumers: two loops of intake, one performer, and one way to commit.

Intake (bus -> decisions)                     Perform (effect -> outcome), never in the intake loop
1 received: a batch arrived                   1 claimed: effects of our lanes, under epochs
2-4 decided: read, fold, handle, cascade      2 effect_done: `perform` returned or failed as data
5 commit: one call, whole or not at all       3 handle the outcome, cascade, commit with the fence
6 offsets: the bus may forget the batch       4 retry later, or give up with an outcome Failed

The numbers are the crash points of the tests. They stand as comments where each step happens:
`intake.py`, `cascade.py`, `committer.py` and `performer.py`.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from infra.spine.ports.artifacts import ArtifactStage
from infra.spine.ports.bus import Bus
from infra.spine.ports.clock import Clock, LogTime
from infra.spine.ports.effects import Effects
from infra.spine.ports.event_log import EventLog
from infra.spine.postgres.errors import reconnecting
from infra.spine.postgres.notify import Wakeup
from infra.spine.runtime.cascade import Drafter
from infra.spine.runtime.claims import Claims
from infra.spine.runtime.committer import Committer
from infra.spine.runtime.consumer import PortsOf
from infra.spine.runtime.folded_states import StateCache
from infra.spine.runtime.hosting import Hosting
from infra.spine.runtime.intake import Intake
from infra.spine.runtime.meter import Meter
from infra.spine.runtime.newer_runs import NewerRuns
from infra.spine.runtime.performer import Performer
from infra.spine.runtime.quarantine import Quarantine
from infra.task_cancellation import end


class Runtime:
    """Hosts consumers: decides, commits and performs, until it is stopped."""

    def __init__(
        self,
        hosting: Hosting,
        *,
        log: EventLog,
        effects: Effects,
        bus: Bus,
        ports: PortsOf,
        artifacts: ArtifactStage,
        clock: Clock,
        wakeup: Wakeup,
    ) -> None:
        time, states = LogTime(clock), StateCache(log)
        self._bus = bus
        meter = Meter(hosting.devices)
        self._claims = Claims(hosting, effects, wakeup, meter=meter)
        newer_runs = NewerRuns(effects)
        drafter = Drafter(
            hosting.consumers,
            states,
            newer_runs=newer_runs,
            now=time.now,
            reserve=self._claims.reserve,
        )
        quarantine = Quarantine(log, effects, states, drafter)
        self._performer = Performer(
            hosting,
            claims=self._claims,
            meter=meter,
            effects=effects,
            ports=ports,
            artifacts=artifacts,
            wakeup=wakeup,
        )
        self._committer = Committer(
            hosting.worker,
            log=log,
            time=time,
            states=states,
            drafter=drafter,
            quarantine=quarantine,
            newer_runs=newer_runs,
            claims=self._claims,
            performer=self._performer,
        )
        self._intake = Intake(
            hosting,
            log=log,
            bus=bus,
            time=time,
            quarantine=quarantine,
            newer_runs=newer_runs,
            claims=self._claims,
            performer=self._performer,
            committer=self._committer,
        )
        self._stopping = asyncio.Event()

    @property
    def commits(self) -> int:
        """How many decisions this process has written."""
        return self._committer.commits

    async def run(self, *, drain: bool = False) -> None:
        """Work until `stop`, or with `drain` until nothing is left to do. Raises what a loop raised."""
        loops = [self._intake.take_events, self._performer.run, self._intake.take_outcomes]
        if drain:
            loops.append(self._wait_until_drained)
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(reconnecting(e)) for e in loops]
        tasks.append(asyncio.ensure_future(self._stopping.wait()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._end(tasks)
        for task in done:
            task.result()

    def stop(self) -> None:
        """Start no further work. Effects in flight are released without counting an attempt."""
        self._stopping.set()

    async def apply_gates(self) -> None:
        """Release the effects whose run is no longer open (called with each heartbeat)."""
        await self._claims.release_closed()

    async def _wait_until_drained(self) -> None:
        """Return once the bus is idle and no effect of this process's consumers remains in an open run.
        An effect that is retried later, or that another worker holds, also counts, because its outcome
        or the end of its lease may bring more work."""
        while True:
            await asyncio.sleep(0.05)
            before = self.commits
            if await self._has_unfinished() or not await self._bus.is_idle():
                continue
            # An event of the first look may have become an effect before the second.
            if not await self._has_unfinished() and self.commits == before:
                return

    async def _has_unfinished(self) -> bool:
        return bool(self._claims.tasks) or await self._claims.has_unfinished()

    async def _end(self, loops: Sequence[asyncio.Future[Any]]) -> None:
        """End everything, each step within a deadline."""
        self._claims.close()
        await end([*loops, *self._claims.tasks])
        await self._claims.release_all()
