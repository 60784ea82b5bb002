"""Several runtimes over one log in memory. A seed decides which of them reads, decides, commits or
performs next, and now and then a runtime forgets the states that it has cached. The outcome of an effect
follows from the effect alone."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from consumers.registry import REGISTRY, lanes_of, load
from infra.blobs.artifacts import ArtifactStore
from infra.blobs.dataset_cache import DatasetCache
from infra.blobs.memory import MemoryBlobs
from infra.settings.settings import Settings
from infra.spine.memory.bus import MemoryBus
from infra.spine.memory.event_log import MemoryEffects, MemoryLog, World
from infra.spine.ports.clock import ManualClock
from infra.spine.ports.event_log import Commit, Recorded
from infra.spine.postgres.notify import Wakeup
from infra.spine.runtime.cascade import Delivery
from infra.spine.runtime.committer import Committer
from infra.spine.runtime.consumer import AnyConsumer
from infra.spine.runtime.hosting import Hosting
from infra.spine.runtime.quarantine import DeliveryBatch
from infra.spine.runtime.runtime import Runtime
from schemas.effects import Effect, Outcome
from schemas.events import Event
from schemas.ids import ConsumerName, StreamName, WorkerId
from tests.kit.ports import AllPorts
from tests.kit.simulate import CAUSE, outcome_of, stream_texts

LOOK_S = 0.01

OFTEN = 0.1
"""The share of records that every host of a consumer is brought."""

TURNS = 6
"""The most turns of the event loop that a call of the log takes."""


class SlowLog(MemoryLog):
    """A log that answers only after some turns of the event loop, in which the other runtimes
    continue."""

    def __init__(self, world: World, draw: random.Random) -> None:
        super().__init__(world)
        self._draw = draw

    async def load(
        self, streams: Mapping[StreamName, int], *, limit: int | None = None
    ) -> Mapping[StreamName, Sequence[Recorded]]:
        found = await super().load(streams, limit=limit)
        await self._turns()
        return found

    async def commit(self, commit: Commit) -> Sequence[Recorded]:
        await self._turns()
        recorded = await super().commit(commit)
        await self._turns()
        return recorded

    async def _turns(self) -> None:
        for _ in range(self._draw.randrange(TURNS)):
            await asyncio.sleep(0)


class SharedBus(MemoryBus):
    """Brings each record to any one of the runtimes that host its consumer, and now and then to all of
    them, as a broker does while its partitions are reassigned."""

    def __init__(self, world: World, crowd: "Crowd", number: int, *, batch: int) -> None:
        super().__init__(world, batch=batch)
        self._crowd, self._number = crowd, number

    async def subscribe(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncGenerator[Sequence[tuple[ConsumerName, Recorded]], None]:
        async with aclosing(super().subscribe(consumers)) as batches:
            async for batch in batches:
                ours = [(name, r) for name, r in batch if self._is_ours(name, r)]
                if ours:
                    yield ours
                else:
                    await self.acknowledge(ours)

    def _is_ours(self, name: ConsumerName, recorded: Recorded) -> bool:
        hosts = [n for n, hosted in enumerate(self._crowd.hosted) if name in hosted]
        draw = random.Random(f"{self._crowd.seed}{name}{recorded.stream}{recorded.version}")
        return draw.random() < OFTEN or draw.choice(hosts) == self._number


def make_forgetful(committer: Committer, draw: random.Random, forgets: float) -> None:
    """Make it lose each cached state with probability `forgets` before each decision. Every effect
    appears to have taken no time and to have cost nothing."""
    commit, write, states = committer.commit, committer._write, committer._states

    async def commit_untimed(deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        return await commit([replace(delivery, seconds=0.0, work=None) for delivery in deliveries])

    async def write_after_forgetting(batch: DeliveryBatch) -> None:
        states.forget([stream for stream in states._cache if draw.random() < forgets])
        await write(batch)

    committer.commit = commit_untimed  # type: ignore[method-assign]  # this one only
    committer._write = write_after_forgetting  # type: ignore[method-assign]  # this one only


@dataclass(frozen=True, slots=True)
class Crowd:
    """The names of the consumers that each runtime hosts, and how the runtimes are disturbed."""

    hosted: tuple[tuple[str, ...], ...]
    seed: int = 0
    forgets: float = 0.0

    @classmethod
    def from_seed(cls, seed: int) -> "Crowd":
        """Two to four runtimes that host everything, or each consumer by itself, two to four times."""
        draw = random.Random(seed)
        together: list[tuple[str, ...]] = [tuple(REGISTRY)]
        apart: list[tuple[str, ...]] = [(name,) for name in REGISTRY]
        each = draw.choice([together, apart])
        return cls(tuple(each * draw.randint(2, 4)), seed, draw.choice([0.0, 0.1, 0.5]))


ALONE = Crowd((tuple(REGISTRY),))
"""One runtime that hosts everything."""


async def stream_texts_of(crowd: Crowd, events: Sequence[Event]) -> list[str]:
    """The texts of all streams that `events` lead to."""
    return stream_texts(await world_of(crowd, events))


async def world_of(crowd: Crowd, events: Sequence[Event], *, within_s: float = 60.0) -> World:
    """The world that `events` lead to, in simulated time (tests/kit/virtual.py). Raises AssertionError
    when it does not come to rest in time."""
    world, draw = World(), random.Random(crowd.seed)
    await MemoryLog(world).append(events, cause=CAUSE)
    async with _at_work(world, crowd, draw):
        for _ in range(int(within_s / LOOK_S)):
            if _is_at_rest(world):
                return world
            await asyncio.sleep(LOOK_S)
    raise AssertionError(f"the runtimes are not at rest after {within_s} s")


def _is_at_rest(world: World) -> bool:
    """Whether everything is consumed and no effect is left."""
    if world.effects:
        return False
    consumers = [_load(name) for name in REGISTRY]
    return all(
        (consumer.name, recorded.id) in world.inbox
        for recorded in world.events
        for consumer in consumers
        if type(recorded.event) in consumer.reads and consumer.routes(recorded.event)
    )


async def _perform(effect: Effect, ports: object) -> Outcome:
    return outcome_of(effect)


def _load(name: str) -> AnyConsumer:
    consumer = load(name)
    return replace(consumer, perform=_perform if consumer.perform else None, ports=None)


@asynccontextmanager
async def _at_work(world: World, crowd: Crowd, draw: random.Random) -> AsyncIterator[None]:
    runtimes = [_runtime(world, crowd, draw, number) for number in range(len(crowd.hosted))]
    tasks = [asyncio.ensure_future(runtime.run()) for runtime in runtimes]
    try:
        yield
    finally:
        for runtime in runtimes:
            runtime.stop()
        await asyncio.gather(*tasks)


def _runtime(world: World, crowd: Crowd, draw: random.Random, number: int) -> Runtime:
    worker = WorkerId(f"runtime-{number}")
    world.workers[worker] = world.now.replace(year=2100)
    log = SlowLog(world, draw)
    artifacts = ArtifactStore(log, MemoryBlobs())
    consumers = tuple(_load(name) for name in crowd.hosted[number])
    runtime = Runtime(
        Hosting(worker, consumers, lanes_of(consumers)),
        log=log,
        effects=MemoryEffects(world),
        bus=SharedBus(world, crowd, number, batch=draw.choice([1, 3, 100])),
        ports=AllPorts(
            log=log,
            blobs=MemoryBlobs(),
            artifacts=artifacts,
            datasets=DatasetCache(artifacts),
            clock=ManualClock(),
            settings=Settings.load({"HEADRACE_HOME": "/nowhere"}),
        ).build,
        artifacts=artifacts,
        clock=ManualClock(),
        wakeup=Wakeup(),
    )
    make_forgetful(runtime._committer, draw, crowd.forgets)
    return runtime
