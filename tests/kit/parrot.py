"""Someone who says everything again: each record of an installation's topics, so many times, in any
order, while the installation works."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.structs import ConsumerRecord

from infra.bus.kafka.connect import options
from infra.bus.kafka.topics import topics
from infra.settings.kafka import KafkaSettings

MARK = "x-again"
POLL_MS = 50
AT_ONCE = 20


class Parrot:
    """Repeats what it hears, but never itself. `said`: event id -> how often it was repeated."""

    def __init__(self, kafka: KafkaSettings, *, times: int, seed: int) -> None:
        self._kafka = kafka
        self._times = times
        self._draw = random.Random(seed)
        self._to_say: list[ConsumerRecord] = []
        self._stop = threading.Event()
        self.listens = threading.Event()
        self.said: Counter[str] = Counter()

    def stop(self) -> None:
        """Hear no more; what was heard is still repeated."""
        self._stop.set()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        ear = AIOKafkaConsumer(*topics(self._kafka), **options(self._kafka))
        mouth = AIOKafkaProducer(**options(self._kafka))
        async with AsyncExitStack() as stack:
            for client in (ear, mouth):
                await client.start()
                stack.push_async_callback(client.stop)
            await ear.seek_to_end()
            self.listens.set()
            while self._to_say or not self._stop.is_set():
                for page in (await ear.getmany(timeout_ms=POLL_MS)).values():
                    for record in page:
                        self._hear(record)
                for _ in range(min(AT_ONCE, len(self._to_say))):
                    await self._say(mouth)

    def _hear(self, record: ConsumerRecord) -> None:
        if MARK not in dict(record.headers):
            self._to_say += [record] * self._times

    async def _say(self, mouth: AIOKafkaProducer) -> None:
        """One of what is still to be said, whichever."""
        at = self._draw.randrange(len(self._to_say))
        self._to_say[at], self._to_say[-1] = self._to_say[-1], self._to_say[at]
        record = self._to_say.pop()
        headers = [*record.headers, (MARK, b"1")]
        await mouth.send(record.topic, record.value, record.key, headers=headers)
        self.said[dict(record.headers)["ce_id"].decode()] += 1


@contextmanager
def parrot(kafka: KafkaSettings, *, times: int, seed: int) -> Iterator[Parrot]:
    """Repeats while inside; at the end everything heard has been said so many times."""
    bird = Parrot(kafka, times=times, seed=seed)
    thread = threading.Thread(target=bird.run)
    thread.start()
    try:
        assert bird.listens.wait(90), "the parrot does not hear"
        yield bird
    finally:
        bird.stop()
        thread.join(60)
