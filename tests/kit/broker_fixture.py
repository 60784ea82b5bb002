"""A test's own part of a broker: its database, its topics, a relay, buses, and raw records."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from uuid import uuid4

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.structs import ConsumerRecord

from infra.settings.kafka import KafkaSettings
from infra.spine.bus.embedded import Reconciled
from infra.spine.bus.kafka.bus import KafkaBus
from infra.spine.bus.kafka.connect import client_options
from infra.spine.bus.kafka.publisher import open_publisher
from infra.spine.bus.reconciler import Delivered, Reconciler
from infra.spine.bus.relay import Relay
from infra.spine.ports.bus import Bus
from infra.spine.ports.event_log import Commit, CommitMiss, Recorded
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database, connect
from infra.spine.postgres.skipped_records import Skips
from schemas.ids import ConsumerName, EventId
from tests.contracts.event_log_suite import warning
from tests.kit.commits import commit_of, new_event

WARNED = ("rl.run.warned",)


@dataclass
class BrokerFixture:
    """The parts that a test of the bus uses. Its topics and groups have the prefix `kafka.prefix`."""

    database: Database
    notifier: Notifier
    log: PostgresLog
    kafka: KafkaSettings
    skips: Skips = field(init=False)

    def __post_init__(self) -> None:
        self.skips = Skips(self.database)

    @property
    def topic(self) -> str:
        """The topic of `rl.run.warned`."""
        return f"{self.kafka.prefix}rl.run.v1"

    def bus(self) -> KafkaBus:
        """The Kafka bus, without the reconciler."""
        return KafkaBus(self.kafka, self.log, self.skips)

    def reconciled(self, *, wait_s: float = 3.0) -> Reconciled:
        """The Kafka bus, with the reconciler."""
        wakeup = self.notifier.subscribe()
        return Reconciled(self.bus(), Reconciler(self.log, wakeup, wait_s=wait_s))

    def relay(self, *, consumers: Sequence[str] = ()) -> Relay:
        return Relay(
            self.database.url,
            self.log,
            self.notifier.subscribe(),
            connect=partial(open_publisher, self.kafka),
            consumers=consumers,
        )

    @asynccontextmanager
    async def relaying(self, *, consumers: Sequence[str] = ()) -> AsyncIterator[None]:
        """Run a relay inside the block."""
        task = asyncio.ensure_future(self.relay(consumers=consumers).run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def warn(self, count: int = 1) -> list[Recorded]:
        """Append `count` warnings, each of a run of its own."""
        return [
            (await self.log.commit(commit_of(warning(uuid4().hex, 1), 1)))[0] for _ in range(count)
        ]

    async def warn_run(self, run: str, start: int, count: int) -> list[Recorded]:
        """Append warnings of one run, of one key, in one transaction."""
        wanted = [new_event(warning(run, n), n) for n in range(start, start + count)]
        expected = {wanted[0].stream: start - 1}
        return list(await self.log.commit(Commit(expected=expected, events=tuple(wanted))))

    async def produce(
        self,
        value: bytes | None,
        headers: Mapping[str, str | bytes],
        *,
        key: bytes = b"k",
        topic: str | None = None,
    ) -> None:
        """Write a record to a topic, without the relay."""
        producer = AIOKafkaProducer(**client_options(self.kafka), max_request_size=32 << 20)
        await producer.start()
        try:
            pairs = [(k, v if isinstance(v, bytes) else v.encode()) for k, v in headers.items()]
            await producer.send_and_wait(topic or self.topic, value, key, headers=pairs)
        finally:
            await producer.stop()

    async def records(self, topic: str | None = None) -> list[ConsumerRecord]:
        """All records of a topic, ordered by partition and offset."""
        reader = AIOKafkaConsumer(**client_options(self.kafka), auto_offset_reset="earliest")
        await reader.start()
        try:
            await reader._client.force_metadata_update()
            found: list[ConsumerRecord] = []
            for number in sorted(await reader._client._wait_on_metadata(topic or self.topic)):
                found += await _drain(reader, TopicPartition(topic or self.topic, number))
            return found
        finally:
            await reader.stop()


async def _drain(reader: AIOKafkaConsumer, place: TopicPartition) -> list[ConsumerRecord]:
    end = (await reader.end_offsets([place]))[place]
    reader.assign([place])
    await reader.seek_to_beginning(place)
    found: list[ConsumerRecord] = []
    async with asyncio.timeout(90):
        while await reader.position(place) < end:
            for page in (await reader.getmany(place, timeout_ms=200)).values():
                found += page
    return found


@asynccontextmanager
async def open_broker_fixture(
    database_url: str, kafka: KafkaSettings
) -> AsyncIterator[BrokerFixture]:
    """A fixture with connections of its own to `database_url`, closed at the end."""
    async with connect(database_url) as database, Notifier(database) as notifier:
        yield BrokerFixture(database, notifier, PostgresLog(database, notifier), kafka)


async def consume(log: PostgresLog, bus: Bus, batch: Delivered) -> list[Recorded]:
    """Consume a batch as the runtime does when its consumers decide nothing. Returns the events that
    nobody else consumed in the meantime."""
    mine = []
    for name, recorded in batch:
        try:
            await log.commit(Commit(consumed=((name, EventId(recorded.id)),)))
        except CommitMiss:
            continue
        mine.append(recorded)
    await bus.acknowledge(batch)
    return mine


def reader() -> dict[ConsumerName, Sequence[str]]:
    """A subscription of a new consumer that reads warnings."""
    return {ConsumerName(f"c{uuid4().hex[:8]}"): WARNED}
