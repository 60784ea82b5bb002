"""Sends events to Kafka: idempotent, `acks=all`, the events of one key in their order.

A `Publisher` lasts as long as its connection. Any failure ends it; the relay then opens another one and
checks again what the broker holds.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.structs import RecordMetadata, TopicPartition

from infra.settings.kafka import KafkaSettings
from infra.spine.bus.kafka.connect import client_options, close_client, limit_client_logging
from infra.spine.bus.kafka.lag import read_lags
from infra.spine.bus.kafka.records import to_record
from infra.spine.bus.kafka.topics import all_topics, create_missing_topics
from infra.spine.ports.event_log import Recorded

BATCH_BYTES = 256 * 1024

Sent = Sequence["asyncio.Future[RecordMetadata]"]
"""Records that were handed over. Each future is done when the broker has answered."""


class BrokerUnavailable(Exception):
    """Kafka did not accept a record, or does not answer. The same call may succeed later."""


class Forgotten(Exception):
    """Kafka no longer holds what it had acknowledged: this is another cluster, or its topics were
    recreated."""


class Publisher:
    """A connection to Kafka that takes events. `cluster` is the cluster's id, `ends` the offset that
    the next record of each `topic/partition` will have."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._admin = AIOKafkaAdminClient(**client_options(settings))
        self._reader = AIOKafkaConsumer(**client_options(settings))
        self._producer = AIOKafkaProducer(
            **client_options(settings),
            enable_idempotence=True,
            acks="all",
            max_batch_size=BATCH_BYTES,
        )
        self._places: list[TopicPartition] = []
        self.cluster = ""
        self.ends: dict[str, int] = {}

    async def send(self, events: Sequence[Recorded]) -> Sent:
        """Hand these events to the client, in this order. Raises BrokerUnavailable."""
        try:
            return [await self._send(event) for event in events]
        except KafkaError as error:
            raise BrokerUnavailable(str(error)) from error

    async def await_acknowledgements(self, sent: Sent) -> None:
        """Return when the broker holds what was sent. Raises BrokerUnavailable, Forgotten."""
        try:
            answers = await asyncio.gather(*sent)
        except KafkaError as error:
            raise BrokerUnavailable(str(error)) from error
        for answer in answers:
            place = f"{answer.topic}/{answer.partition}"
            if answer.offset < self.ends.get(place, 0):
                raise Forgotten(f"{place} was recreated")
            self.ends[place] = answer.offset + 1

    async def check(self) -> None:
        """Return if this is still the same Kafka. Raises BrokerUnavailable, Forgotten."""
        try:
            cluster, present = await self._look()
        except (KafkaError, TimeoutError) as error:
            raise BrokerUnavailable(str(error) or "it does not answer") from error
        if cluster != self.cluster:
            raise Forgotten(f"it is another cluster ({cluster}, not {self.cluster})")
        if gone := set(all_topics(self._settings)) - present:
            raise Forgotten(f"its topics {', '.join(sorted(gone))} are gone")

    async def read_lags(self) -> Mapping[str, int]:
        """Consumer group -> records that it has not acknowledged. Raises BrokerUnavailable."""
        try:
            return await read_lags(self._settings, self._admin, self._reader, self._places)
        except (KafkaError, TimeoutError) as error:
            raise BrokerUnavailable(str(error) or "it does not answer") from error

    async def open(self) -> None:
        """Connect, read the cluster's id and end offsets, and create missing topics. Raises
        BrokerUnavailable."""
        try:
            for client in (self._admin, self._reader, self._producer):
                await client.start()
            await self._begin()
        except (KafkaError, TimeoutError) as error:
            raise BrokerUnavailable(str(error) or "it does not answer") from error

    async def close(self) -> None:
        """Close the connections. Unsent events are not flushed: the next publisher sends them."""
        await asyncio.gather(
            _stop_producer(self._producer),
            close_client(self._reader.stop()),
            close_client(self._admin.close()),
        )

    async def _begin(self) -> None:
        await create_missing_topics(self._admin, self._settings)
        self.cluster, _ = await self._look()
        found = await self._admin.describe_topics(list(all_topics(self._settings)))
        self._places = [
            TopicPartition(topic["topic"], partition["partition"])
            for topic in found
            for partition in topic["partitions"]
        ]
        ends = await self._reader.end_offsets(self._places)
        self.ends = {f"{at.topic}/{at.partition}": offset for at, offset in ends.items()}

    async def _look(self) -> tuple[str, set[str]]:
        found = await self._admin.describe_cluster()
        return str(found["cluster_id"]), set(await self._admin.list_topics())

    async def _send(self, event: Recorded) -> "asyncio.Future[RecordMetadata]":
        made = to_record(event, self._settings)
        future: asyncio.Future[RecordMetadata] = await self._producer.send(
            made.topic, made.value, made.key, headers=list(made.headers)
        )
        future.add_done_callback(_retrieve_exception)
        return future


def _retrieve_exception(future: "asyncio.Future[RecordMetadata]") -> None:
    """Read the error of a future that nobody awaits any more, so that asyncio does not log it. The
    position did not move."""
    if not future.cancelled():
        future.exception()


@asynccontextmanager
async def open_publisher(settings: KafkaSettings) -> AsyncIterator[Publisher]:
    """A publisher that is connected inside the block. Raises BrokerUnavailable when Kafka does not
    answer."""
    limit_client_logging()
    publisher = Publisher(settings)
    try:
        await publisher.open()
        yield publisher
    finally:
        await publisher.close()


async def _stop_producer(producer: AIOKafkaProducer) -> None:
    """Stop it even if it cannot flush. Its `stop` flushes first, so after a timeout its sender task
    would keep running with connections of its own. That task is cancelled here."""
    if await close_client(producer.stop()):
        return
    sender = producer._sender and producer._sender.sender_task
    while (
        sender is not None and not sender.done()
    ):  # the first request to end only stops the next batch
        sender.cancel()
        await asyncio.wait([sender], timeout=0.1)
    await close_client(producer.client.close())
