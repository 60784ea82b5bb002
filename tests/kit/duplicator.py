"""Duplicates an installation's Kafka records while it works: each record of its topics is sent again
several times, in random order."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.structs import ConsumerRecord

from infra.settings.kafka import KafkaSettings
from infra.spine.bus.kafka.connect import client_options
from infra.spine.bus.kafka.topics import all_topics

MARK = "x-again"
POLL_MS = 50
AT_ONCE = 20


class Duplicator:
    """Sends each record again, but never its own copies. `copies`: event id -> how many were sent."""

    def __init__(self, kafka: KafkaSettings, *, times: int, seed: int) -> None:
        self._kafka = kafka
        self._times = times
        self._draw = random.Random(seed)
        self._pending: list[ConsumerRecord] = []
        self._stop = threading.Event()
        self.listening = threading.Event()
        self.copies: Counter[str] = Counter()

    def stop(self) -> None:
        """Read no more records. Copies of records that were already read are still sent."""
        self._stop.set()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        consumer = AIOKafkaConsumer(*all_topics(self._kafka), **client_options(self._kafka))
        producer = AIOKafkaProducer(**client_options(self._kafka))
        async with AsyncExitStack() as stack:
            for client in (consumer, producer):
                await client.start()
                stack.push_async_callback(client.stop)
            await consumer.seek_to_end()
            self.listening.set()
            while self._pending or not self._stop.is_set():
                for page in (await consumer.getmany(timeout_ms=POLL_MS)).values():
                    for record in page:
                        self._take(record)
                for _ in range(min(AT_ONCE, len(self._pending))):
                    await self._send_copy(producer)

    def _take(self, record: ConsumerRecord) -> None:
        if MARK not in dict(record.headers):
            self._pending += [record] * self._times

    async def _send_copy(self, producer: AIOKafkaProducer) -> None:
        """Send one of the pending copies, at random."""
        at = self._draw.randrange(len(self._pending))
        self._pending[at], self._pending[-1] = self._pending[-1], self._pending[at]
        record = self._pending.pop()
        headers = [*record.headers, (MARK, b"1")]
        await producer.send(record.topic, record.value, record.key, headers=headers)
        self.copies[dict(record.headers)["ce_id"].decode()] += 1


@contextmanager
def duplicator(kafka: KafkaSettings, *, times: int, seed: int) -> Iterator[Duplicator]:
    """Duplicates inside the block. At its end each record read has been sent `times` more times."""
    running = Duplicator(kafka, times=times, seed=seed)
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        assert running.listening.wait(90), "the duplicator did not start to read"
        yield running
    finally:
        running.stop()
        thread.join(60)
