"""An effect that a live worker holds without progress is logged once per claim. What progresses, waits
or is held by a dead worker is not."""

import asyncio
import logging
from collections.abc import Callable
from uuid import UUID, uuid4

import pytest

from infra.readmodel.stalled_effects import StalledEffects, watch_stalled_effects
from infra.spine.ports.clock import ManualClock
from infra.spine.ports.effects import Claimed
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.pool import Database
from schemas.effects import FetchCommit, Lane
from schemas.ids import ConsumerName, WorkerId
from schemas.specs import CommitSpec

pytestmark = pytest.mark.postgres

WORKER = WorkerId("w")
EFFECT = FetchCommit(
    workspace="w1", request=UUID(int=1), commit=CommitSpec(url="/nowhere"), entrypoints=()
)


async def claim(effects: PostgresEffects) -> Claimed:
    [found] = await effects.claim(
        WORKER, room={Lane.CONTROL: 1}, consumers=[ConsumerName("sync")], generation=0
    )
    return found


async def age(database: Database, *, hours: float) -> None:
    """Let hours pass without progress."""
    await database.durable.execute(
        "update effects set progressed_at = clock_timestamp() - make_interval(hours => $1)",
        hours,
    )


@pytest.fixture
async def effects(database: Database) -> PostgresEffects:
    """One effect that waits, and a worker."""
    found = PostgresEffects(database)
    await found.register(WORKER, host="h", pid=1, lease_s=600)
    await database.durable.execute(
        "insert into effects (id, consumer, stream, lane, run_id, type, data, correlation)"
        " values ($1, 'sync', 'workspace-w1', 'control', 'w1', 'FetchCommit', $2, $3)",
        EFFECT.id,
        EFFECT.model_dump_json(),
        uuid4(),
    )
    return found


async def test_an_effect_without_progress_is_found(
    database: Database, effects: PostgresEffects
) -> None:
    stalled = StalledEffects(database)
    await age(database, hours=9)
    assert await stalled.find_stalled() == [], "nobody holds it"
    claimed = await claim(effects)
    assert await stalled.find_stalled() == [], "it was claimed now"
    await age(database, hours=9)
    [found] = await stalled.find_stalled()
    assert (found.type, found.lane, found.run, found.worker) == (
        "FetchCommit",
        "control",
        "w1",
        "w",
    )
    assert found.claim == (str(EFFECT.id), 1)
    assert 9 * 3600 <= found.seconds < 10 * 3600
    await effects.release(claimed)
    await claim(effects)
    assert await stalled.find_stalled() == [], "it was claimed again"
    await age(database, hours=9)
    await effects.expire(WORKER)
    assert await stalled.find_stalled() == [], "its worker is dead, and another one takes it over"


async def wait_until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_it_is_logged_once_per_claim(
    database: Database, effects: PostgresEffects, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rounds = []

    class Clock(ManualClock):
        async def sleep(self, seconds: float) -> None:
            rounds.append(seconds)
            await asyncio.sleep(0.01)

    def told() -> list[str]:
        return [r.getMessage() for r in caplog.records if "no progress" in r.getMessage()]

    claimed = await claim(effects)
    await age(database, hours=2)
    task = asyncio.ensure_future(watch_stalled_effects(StalledEffects(database), Clock()))
    await wait_until(lambda: len(rounds) > 5)
    [said] = told()
    assert said.startswith("run w1: FetchCommit shows no progress: w claimed it 2 h ago")
    await effects.release(claimed)
    await claim(effects)
    await age(database, hours=2)
    await wait_until(lambda: len(told()) == 2)
    count = len(rounds)
    await wait_until(lambda: len(rounds) > count + 5)
    assert len(told()) == 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
