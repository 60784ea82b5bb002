"""The Bus port on Kafka: one consumer group per hosted set of consumers, at least once.

A record wakes a consumer up and names an event; the event is read from the log (`records.py`), and in
the same breath what was consumed already is dropped. Offsets are committed behind a batch once its
decisions are, explicitly, by a task of their own. After a rebalance the batch in hand may belong to
somebody else: its offsets are then not ours to commit, and what was done twice the inbox drops. While
the broker is away nothing comes from here; the reconciler (`infra/bus/reconciler.py`) goes on.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.errors import IllegalStateError, KafkaError
from aiokafka.structs import TopicPartition

from infra.bus.kafka.connect import hang_up, options, quieten
from infra.bus.kafka.intake import Intake
from infra.bus.kafka.topics import ensure, topics_of
from infra.bus.reconciler import Delivered
from infra.ports.event_log import EventLog
from infra.postgres.skipped_records import Skips
from infra.settings.kafka import KafkaSettings
from infra.task_cancellation import end, go_on
from schemas.ids import ConsumerName

logger = logging.getLogger(__name__)

BATCH = 100
POLL_MS = 1000
COMMIT_S = 2.0
"""How long a commit of offsets may take."""
COMMIT_EVERY_S = 0.5
"""Offsets are committed at most this often. What comes again after a crash the inbox drops."""

JOIN_S = 30.0
RETRY_S = 1.0

Offsets = dict[TopicPartition, int]


class KafkaBus:
    """`infra.ports.bus.Bus` on Kafka, without what makes it whole
    (`infra.bus.embedded.Reconciled`)."""

    def __init__(self, settings: KafkaSettings, log: EventLog, skips: Skips) -> None:
        self._settings = settings
        self._log = log
        self._skips = skips
        self._pending: Offsets = {}
        self._done: Offsets = {}
        self._more_done = asyncio.Event()
        self._said = ""

    async def subscribe(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncGenerator[Delivered, None]:
        quieten()
        intake = Intake(self._log, consumers, self._skips)
        await intake.open()
        while True:
            try:
                async with self._joined(consumers) as consumer:
                    self._say("Kafka brings events")
                    while True:
                        batch = await self._batch(consumer, intake)
                        if batch:
                            yield batch
                        else:
                            await self.acknowledge(batch)
            except (KafkaError, OSError) as error:
                go_on()
                self._say(f"Kafka brings nothing ({error}); events come from the log, later")
            await asyncio.sleep(RETRY_S)

    async def acknowledge(self, batch: Delivered) -> None:
        """The offsets are committed in the background: nobody needs to wait for a broker here."""
        self._done |= self._pending
        self._pending = {}
        self._more_done.set()

    async def idle(self) -> bool:
        """Whether nothing that came is unacknowledged; what has not come yet only the log knows."""
        return not self._pending

    async def _committing(self, consumer: AIOKafkaConsumer) -> None:
        """Commit what is done, for as long as this membership lasts."""
        while True:
            await self._more_done.wait()
            self._more_done.clear()
            await self._commit(consumer)
            await asyncio.sleep(COMMIT_EVERY_S)

    async def _commit(self, consumer: AIOKafkaConsumer) -> None:
        """Of what is done, the offsets of partitions that are still ours. What is not committed comes
        again, to us or to who has the partition now, and the inbox drops it."""
        assigned = consumer.assignment()
        self._done = {place: at for place, at in self._done.items() if place in assigned}
        offsets = dict(self._done)
        if not offsets:
            return
        try:
            async with asyncio.timeout(COMMIT_S):
                await consumer.commit(offsets)
        except (KafkaError, IllegalStateError, TimeoutError) as error:
            logger.info("offsets were not committed, their records may come again: %s", error)
            return
        self._done = {place: at for place, at in self._done.items() if offsets.get(place) != at}

    async def _batch(self, consumer: AIOKafkaConsumer, intake: Intake) -> Delivered:
        fetched = await consumer.getmany(timeout_ms=POLL_MS, max_records=BATCH)
        records = [record for page in fetched.values() for record in page]
        self._pending = {place: page[-1].offset + 1 for place, page in fetched.items() if page}
        return await intake.due(records) if records else ()

    @asynccontextmanager
    async def _joined(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncIterator[AIOKafkaConsumer]:
        """A member of the group, with topics that exist. Raises KafkaError, TimeoutError."""
        await self._ensure()
        kinds = {kind for kinds in consumers.values() for kind in kinds}
        consumer = AIOKafkaConsumer(
            *topics_of(self._settings, kinds),
            **options(self._settings),
            group_id=group(self._settings, consumers),
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            partition_assignment_strategy=(RoundRobinPartitionAssignor,),
            session_timeout_ms=10_000,
            heartbeat_interval_ms=1000,
            max_poll_interval_ms=600_000,
        )
        try:
            async with asyncio.timeout(JOIN_S):
                await consumer.start()
            self._pending, self._done = {}, {}
            committing = asyncio.ensure_future(self._committing(consumer))
            try:
                yield consumer
            finally:
                await end([committing])
                await self._commit(consumer)
        finally:
            await _stop(consumer)

    async def _ensure(self) -> None:
        admin = AIOKafkaAdminClient(**options(self._settings))
        try:
            await admin.start()
            await ensure(admin, self._settings)
        finally:
            await admin.close()

    def _say(self, message: str) -> None:
        """Once, not at every attempt."""
        if message != self._said:
            logger.warning("%s", message)
        self._said = message


def group(settings: KafkaSettings, consumers: Mapping[ConsumerName, Sequence[str]]) -> str:
    """The consumer group of these consumers: processes that host the same share the work."""
    return group_prefix(settings) + "+".join(sorted(consumers))


def group_prefix(settings: KafkaSettings) -> str:
    """What the names of this installation's groups begin with."""
    return f"{settings.prefix}headrace."


async def _stop(consumer: AIOKafkaConsumer) -> None:
    """Leave the group in order, or at least leave: what cannot say goodbye would go on fetching."""
    if not await hang_up(consumer.stop()):
        await hang_up(consumer._fetcher.close())
        await hang_up(consumer._client.close())
