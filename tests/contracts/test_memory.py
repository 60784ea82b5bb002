"""The in-memory adapters keep every contract."""

import pytest

from infra.blobs.memory import MemoryBlobs
from infra.spine.memory.bus import MemoryBus
from infra.spine.memory.event_log import MemoryEffects, MemoryLog, World
from schemas.ids import WorkerId
from tests.contracts.blobs_suite import BlobsSuite
from tests.contracts.bus_suite import BoundBus, BusSuite
from tests.contracts.effects_suite import Bound, EffectsSuite
from tests.contracts.event_log_suite import EventLogSuite


class TestLog(EventLogSuite):
    @pytest.fixture
    def log(self) -> MemoryLog:
        return MemoryLog(World())


class TestEffects(EffectsSuite):
    @pytest.fixture
    def bound(self) -> Bound:
        world = World()

        async def expire_lease(seconds: float, worker: WorkerId) -> None:
            world.workers[worker] = world.now

        return Bound(MemoryLog(world), MemoryEffects(world), expire_lease)


class TestBus(BusSuite):
    @pytest.fixture
    def bound(self) -> BoundBus:
        world = World()
        return BoundBus(MemoryLog(world), lambda: MemoryBus(world))


class TestBlobs(BlobsSuite):
    @pytest.fixture
    def blobs(self) -> MemoryBlobs:
        return MemoryBlobs()
