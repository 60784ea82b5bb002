"""The Bus port on Kafka: one consumer group per hosted set of consumers, at least once.

A record wakes a consumer up and names an event. The event itself is read from the log (`records.py`),
and the same query drops what was already consumed. Offsets are committed explicitly, by a task of its
own, after the decisions of their batch. After a rebalance the current batch may belong to another
process. Then this process may not commit its offsets, and the inbox drops what was delivered twice.
While the broker is unavailable this bus delivers nothing, and the reconciler
(`infra/spine/bus/reconciler.py`) delivers instead.
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

from infra.settings.kafka import KafkaSettings
from infra.spine.bus.kafka.connect import client_options, close_client, limit_client_logging
from infra.spine.bus.kafka.intake import RecordIntake
from infra.spine.bus.kafka.topics import create_missing_topics, topics_for_types
from infra.spine.bus.reconciler import Delivered
from infra.spine.ports.event_log import EventLog
from infra.spine.postgres.skipped_records import Skips
from infra.task_cancellation import end, go_on
from schemas.ids import ConsumerName

logger = logging.getLogger(__name__)

BATCH = 100
POLL_MS = 1000
COMMIT_S = 2.0
"""How long a commit of offsets may take."""
COMMIT_EVERY_S = 0.5
"""Offsets are committed at most this often. After a crash the inbox drops repeated records."""

JOIN_S = 30.0
RETRY_S = 1.0

Offsets = dict[TopicPartition, int]


class KafkaBus:
    """`Bus` on Kafka alone. `infra.spine.bus.embedded.Reconciled` makes it complete."""

    def __init__(self, settings: KafkaSettings, log: EventLog, skips: Skips) -> None:
        self._settings = settings
        self._log = log
        self._skips = skips
        self._pending: Offsets = {}
        self._done: Offsets = {}
        self._more_done = asyncio.Event()
        self._last_logged = ""

    async def subscribe(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncGenerator[Delivered, None]:
        limit_client_logging()
        intake = RecordIntake(self._log, consumers, self._skips)
        await intake.open()
        while True:
            try:
                async with self._join_group(consumers) as consumer:
                    self._log_once("connected to Kafka; events come from it")
                    while True:
                        batch = await self._batch(consumer, intake)
                        if batch:
                            yield batch
                        else:
                            await self.acknowledge(batch)
            except (KafkaError, OSError) as error:
                go_on()
                self._log_once(
                    f"Kafka is not available ({error}); events come from the log, a little later"
                )
            await asyncio.sleep(RETRY_S)

    async def acknowledge(self, batch: Delivered, left: Delivered = ()) -> None:
        """Mark the batch as done. A task in the background commits its offsets, so nobody waits for
        the broker here. The reconciler of a newer process finds `left` in the log."""
        self._done |= self._pending
        self._pending = {}
        self._more_done.set()

    async def is_idle(self) -> bool:
        """Whether every delivered batch is acknowledged. Only the log knows what has not come yet."""
        return not self._pending

    async def _commit_until_left(self, consumer: AIOKafkaConsumer) -> None:
        """Commit what is done, for as long as this group membership lasts."""
        while True:
            await self._more_done.wait()
            self._more_done.clear()
            await self._commit(consumer)
            await asyncio.sleep(COMMIT_EVERY_S)

    async def _commit(self, consumer: AIOKafkaConsumer) -> None:
        """Commit what is done in partitions that are still ours. Records that are not committed are
        delivered again, here or where the partition is now, and the inbox drops them."""
        assigned = consumer.assignment()
        self._done = {place: at for place, at in self._done.items() if place in assigned}
        offsets = dict(self._done)
        if not offsets:
            return
        try:
            async with asyncio.timeout(COMMIT_S):
                await consumer.commit(offsets)
        except (KafkaError, IllegalStateError, TimeoutError) as error:
            logger.info(
                "offsets were not committed (%s); their records may be delivered again", error
            )
            return
        self._done = {place: at for place, at in self._done.items() if offsets.get(place) != at}

    async def _batch(self, consumer: AIOKafkaConsumer, intake: RecordIntake) -> Delivered:
        fetched = await consumer.getmany(timeout_ms=POLL_MS, max_records=BATCH)
        records = [record for page in fetched.values() for record in page]
        self._pending = {place: page[-1].offset + 1 for place, page in fetched.items() if page}
        return await intake.unconsumed(records) if records else ()

    @asynccontextmanager
    async def _join_group(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncIterator[AIOKafkaConsumer]:
        """Be a member of the group inside the block; topics are created first. Raises KafkaError,
        TimeoutError."""
        await self._ensure()
        kinds = {kind for kinds in consumers.values() for kind in kinds}
        consumer = AIOKafkaConsumer(
            *topics_for_types(self._settings, kinds),
            **client_options(self._settings),
            group_id=group_name(self._settings, consumers),
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
            committing = asyncio.ensure_future(self._commit_until_left(consumer))
            try:
                yield consumer
            finally:
                await end([committing])
                await self._commit(consumer)
        finally:
            await _stop(consumer)

    async def _ensure(self) -> None:
        admin = AIOKafkaAdminClient(**client_options(self._settings))
        try:
            await admin.start()
            await create_missing_topics(admin, self._settings)
        finally:
            await admin.close()

    def _log_once(self, message: str) -> None:
        """Log a message unless it was the last one: attempts repeat often."""
        if message != self._last_logged:
            logger.warning("%s", message)
        self._last_logged = message


def group_name(settings: KafkaSettings, consumers: Mapping[ConsumerName, Sequence[str]]) -> str:
    """The name of these consumers' group: processes that host the same consumers share the work."""
    return group_prefix(settings) + "+".join(sorted(consumers))


def group_prefix(settings: KafkaSettings) -> str:
    """The prefix of the names of this installation's groups."""
    return f"{settings.prefix}headrace."


async def _stop(consumer: AIOKafkaConsumer) -> None:
    """Leave the group in order. If that fails, close the connections, or it would keep fetching."""
    if not await close_client(consumer.stop()):
        await close_client(consumer._fetcher.close())
        await close_client(consumer._client.close())
