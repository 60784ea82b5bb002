"""Takes in the messages to decide on: events from the bus, and outcomes from the performer."""

import logging
from collections.abc import Sequence
from contextlib import aclosing

from infra import failpoints
from infra.spine.ports.bus import Bus
from infra.spine.ports.clock import LogTime
from infra.spine.ports.event_log import EventStore, Recorded
from infra.spine.runtime.attempt import Attempt
from infra.spine.runtime.cascade import Delivery
from infra.spine.runtime.claims import Claims
from infra.spine.runtime.committer import Committer
from infra.spine.runtime.hosting import Hosting
from infra.spine.runtime.newer_runs import NewerRuns
from infra.spine.runtime.performer import Performer
from infra.spine.runtime.quarantine import Quarantine
from infra.task_cancellation import go_on
from schemas.envelope import NewerEvent
from schemas.events.dead_letters import MessageRedriven
from schemas.ids import ConsumerName

logger = logging.getLogger(__name__)


class Intake:
    """Runs two loops. Each turns the messages that arrive into deliveries, and commits them."""

    def __init__(
        self,
        hosting: Hosting,
        *,
        log: EventStore,
        bus: Bus,
        time: LogTime,
        quarantine: Quarantine,
        newer_runs: NewerRuns,
        claims: Claims,
        performer: Performer,
        committer: Committer,
    ) -> None:
        self._consumers = {consumer.name: consumer for consumer in hosting.consumers}
        self._log = log
        self._bus = bus
        self._time = time
        self._quarantine = quarantine
        self._newer_runs = newer_runs
        self._claims = claims
        self._performer = performer
        self._committer = committer
        self._left_runs: set[str] = set()

    async def take_events(self) -> None:
        """Decide on the events of the bus, without end."""
        reads = {
            name: [*(event.type for event in consumer.reads), MessageRedriven.type]
            for name, consumer in self._consumers.items()
        }
        self._time.observe(await self._log.clock_time())
        async with aclosing(self._bus.subscribe(reads)) as batches:
            async for batch in batches:
                await self._take_batch(batch)

    async def _take_batch(self, batch: Sequence[tuple[ConsumerName, Recorded]]) -> None:
        # 1 received: a batch arrived
        left: list[tuple[ConsumerName, Recorded]] = []
        deliveries: list[Delivery] = []
        runs = {recorded.run for _, recorded in batch}
        newer = await self._newer_runs.among(runs)
        for name, recorded in batch:
            try:
                if recorded.run in newer:
                    raise NewerEvent("it began under a newer release")
                delivery = await self._quarantine.read(self._consumers[name], recorded)
            except NewerEvent as error:
                self._log_left(recorded, error)
                left.append((name, recorded))
                continue
            deliveries += [delivery] if delivery is not None else []
        names = {delivery.consumer.name for delivery in deliveries}
        for name in names:
            failpoints.hit(f"{name}.intake.received")
        # 2-5 decide and commit
        for delivery in await self._committer.commit(deliveries):
            if delivery.brought_by is not None:
                left.append((delivery.consumer.name, delivery.brought_by))
        # 6 offsets: the bus may forget the batch
        await self._bus.acknowledge(batch, left)
        for name in names:
            failpoints.hit(f"{name}.intake.offset_committed")

    def _log_left(self, recorded: Recorded, error: NewerEvent) -> None:
        """Log what is left for a newer release, once for each run."""
        if recorded.run not in self._left_runs:
            self._left_runs.add(recorded.run)
            logger.warning("%s waits for a newer release of Headrace: %s", recorded.run, error)

    async def take_outcomes(self) -> None:
        """Decide on the outcomes of finished attempts, without end."""
        while True:
            go_on()
            finished = await self._performer.take_finished()
            ours = [a for a in finished if self._claims.get_claim(a.claimed.id) is a.claimed]
            self._claims.begin_commit(attempt.claimed for attempt in ours)
            for attempt in finished:
                self._claims.forget(attempt.claimed)
            # 3 handle the outcome, cascade, commit with the fence
            await self._committer.commit([self._delivery_of(attempt) for attempt in ours])
            self._claims.end_commit()
            # Their places are free, whether the outcomes were written, refused or left.
            if self._claims.may_claim:
                self._performer.wake()

    def _delivery_of(self, attempt: Attempt) -> Delivery:
        assert attempt.outcome is not None, attempt.claimed.id  # noqa: S101 - only then it is finished
        return Delivery(
            consumer=self._consumers[attempt.claimed.consumer],
            message=attempt.outcome,
            id=attempt.claimed.id,
            correlation=attempt.claimed.correlation,
            traceparent=attempt.traceparent,
            claimed=attempt.claimed,
            artifacts=attempt.artifacts,
            seconds=attempt.seconds,
            work=attempt.work,
        )
