"""Sends events to Kafka: idempotent, `acks=all`, the events of one key in their order.

A `Publisher` lives as long as its connection is good for: whatever goes wrong ends it, and the relay
makes another and looks again at what it finds there.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.structs import RecordMetadata, TopicPartition

from infra.bus.kafka.connect import hang_up, options, quieten
from infra.bus.kafka.lag import lags
from infra.bus.kafka.records import record
from infra.bus.kafka.topics import ensure, topics
from infra.ports.event_log import Recorded
from infra.settings.kafka import KafkaSettings

BATCH_BYTES = 256 * 1024

Sent = Sequence["asyncio.Future[RecordMetadata]"]
"""Records that were handed over; each is done when the broker has answered."""


class BrokerAway(Exception):
    """Kafka did not take what it was sent, or does not answer; the same may succeed later."""


class Forgotten(Exception):
    """Kafka no longer holds what it had acknowledged: it is another cluster, or its topics were made
    again."""


class Publisher:
    """A connection to Kafka that takes events. `cluster` names who takes them; `ends`: the offset that
    the next record of each `topic/partition` will have."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._admin = AIOKafkaAdminClient(**options(settings))
        self._reader = AIOKafkaConsumer(**options(settings))
        self._producer = AIOKafkaProducer(
            **options(settings), enable_idempotence=True, acks="all", max_batch_size=BATCH_BYTES
        )
        self._places: list[TopicPartition] = []
        self.cluster = ""
        self.ends: dict[str, int] = {}

    async def send(self, events: Sequence[Recorded]) -> Sent:
        """Hand these over, in this order. Raises BrokerAway."""
        try:
            return [await self._send(event) for event in events]
        except KafkaError as error:
            raise BrokerAway(str(error)) from error

    async def acknowledged(self, sent: Sent) -> None:
        """Return when the broker holds what was sent. Raises BrokerAway, Forgotten."""
        try:
            answers = await asyncio.gather(*sent)
        except KafkaError as error:
            raise BrokerAway(str(error)) from error
        for answer in answers:
            place = f"{answer.topic}/{answer.partition}"
            if answer.offset < self.ends.get(place, 0):
                raise Forgotten(f"{place} was made again")
            self.ends[place] = answer.offset + 1

    async def check(self) -> None:
        """Whether Kafka is still the one it was. Raises BrokerAway, Forgotten."""
        try:
            cluster, present = await self._look()
        except (KafkaError, TimeoutError) as error:
            raise BrokerAway(str(error) or "it does not answer") from error
        if cluster != self.cluster:
            raise Forgotten(f"it is another cluster ({cluster}, not {self.cluster})")
        if gone := set(topics(self._settings)) - present:
            raise Forgotten(f"its topics {', '.join(sorted(gone))} are gone")

    async def lags(self) -> Mapping[str, int]:
        """Consumer group -> records that it has not acknowledged. Raises BrokerAway."""
        try:
            return await lags(self._settings, self._admin, self._reader, self._places)
        except (KafkaError, TimeoutError) as error:
            raise BrokerAway(str(error) or "it does not answer") from error

    async def open(self) -> None:
        """Connect, see who it is and how much it holds, and make the topics. Raises BrokerAway."""
        try:
            for client in (self._admin, self._reader, self._producer):
                await client.start()
            await self._begin()
        except (KafkaError, TimeoutError) as error:
            raise BrokerAway(str(error) or "it does not answer") from error

    async def close(self) -> None:
        """Hang up. What is still unsent is sent by who comes next: nobody waits for it here."""
        await asyncio.gather(
            _stopped(self._producer), hang_up(self._reader.stop()), hang_up(self._admin.close())
        )

    async def _begin(self) -> None:
        await ensure(self._admin, self._settings)
        self.cluster, _ = await self._look()
        found = await self._admin.describe_topics(list(topics(self._settings)))
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
        made = record(event, self._settings)
        future: asyncio.Future[RecordMetadata] = await self._producer.send(
            made.topic, made.value, made.key, headers=list(made.headers)
        )
        future.add_done_callback(_seen)
        return future


def _seen(future: "asyncio.Future[RecordMetadata]") -> None:
    """A failure that nobody waits for any more is no news: the position did not move."""
    if not future.cancelled():
        future.exception()


@asynccontextmanager
async def publishing(settings: KafkaSettings) -> AsyncIterator[Publisher]:
    """A publisher that is connected while inside. Raises BrokerAway when Kafka does not answer."""
    quieten()
    publisher = Publisher(settings)
    try:
        await publisher.open()
        yield publisher
    finally:
        await publisher.close()


async def _stopped(producer: AIOKafkaProducer) -> None:
    """Stop it even if it cannot flush. Its `stop` waits for that first, so where we lose patience its
    sender would go on behind our back, with connections of its own: it is ended by name."""
    if await hang_up(producer.stop()):
        return
    sender = producer._sender and producer._sender.sender_task
    while (
        sender is not None and not sender.done()
    ):  # the first request to end only stops the next batch
        sender.cancel()
        await asyncio.wait([sender], timeout=0.1)
    await hang_up(producer.client.close())
