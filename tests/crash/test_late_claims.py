"""A claim is sent, the network swallows it for longer than its client waits, and delivers it after all,
when the worker has long given up what it does not know of. It must take nothing: nobody would perform
it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from infra.settings.settings import DatabaseLimits
from infra.spine.ports.effects import Claimed
from infra.spine.ports.event_log import Commit
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database, connect
from infra.spine.runtime import claims, performer
from schemas.effects import Lane
from schemas.ids import WorkerId
from tests.contracts.effects_suite import SYNC, effect
from tests.kit.at_once import AtOnce
from tests.kit.hosting import Script, consumer
from tests.kit.on_postgres import WORKER, working
from tests.kit.partition_proxy import PartitionProxy, partition_proxy
from tests.kit.postgres import open_database

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

at_once = AtOnce()

STATEMENT_S = 0.5


class Stalling(PostgresEffects):
    """Its first claim meets a network that has just been cut; the next ones wait to be `allowed`."""

    def __init__(self, database: Database, network: PartitionProxy) -> None:
        super().__init__(database)
        self._network = network
        self._cut = False
        self.given_up = asyncio.Event()
        self.allowed = asyncio.Event()
        self.fenced = True

    async def claim(self, worker: WorkerId, **asked: Any) -> Sequence[Claimed]:
        if self._cut:
            await self.allowed.wait()
            return await super().claim(worker, **asked)
        await self._warm()
        self._cut = True
        self._network.cut(late=True)
        try:
            if self.fenced:
                return await super().claim(worker, **asked)
            # As it was: nobody asks for the generation.
            await self._pool.fetch(
                "select * from claim_effects($1, $2, $3, $4)",
                worker,
                [str(lane) for lane in asked["room"]],
                list(asked["consumers"]),
                max(asked["room"].values()),
            )
            return ()
        finally:
            self.given_up.set()

    async def _warm(self) -> None:
        """Statements are prepared before: what is late then is one message."""
        lanes = [str(Lane.TRAIN)]
        sql = "select * from claim_effects($1, $2, $3, $4)"
        await self._pool.fetch(sql, "nobody", lanes, ["nothing"], 1)
        await super().claim(WorkerId("nobody"), room={Lane.TRAIN: 1}, consumers=[SYNC])


@asynccontextmanager
async def stalled(url: str, home: Path, script: Script, *, fenced: bool) -> AsyncIterator[Database]:
    """A worker at work behind a network whose first claim was delivered late, to a database in which an
    effect has come to wait meanwhile."""
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    limits = DatabaseLimits(pool=1, statement_s=STATEMENT_S)
    with partition_proxy(parts.hostname, parts.port) as network:
        through = url.replace(f"{parts.hostname}:{parts.port}", f"127.0.0.1:{network.port}")
        async with open_database(url) as direct, connect(through, limits=limits) as cut:
            effects = Stalling(cut, network)
            effects.fenced = fenced
            async with working(consumer(script, name="sync"), cut, home, effects):
                async with asyncio.timeout(60):
                    await effects.given_up.wait()
                    network.heal()
                    while (await PostgresEffects(direct).holding(WORKER)).generation < 2:
                        await asyncio.sleep(0.02)
                await _asked(direct)
                # A read may have been under way beside the claim; it changes nothing.
                assert await asyncio.to_thread(network.deliver) >= 1
                effects.allowed.set()
                yield direct


async def _asked(direct: Database) -> None:
    """An effect waits, and no worker is notified."""
    await PostgresLog(direct, Notifier(direct)).commit(Commit(effects=(effect(uuid4().hex),)))


async def performed(script: Script, *, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not script.performed:
            await asyncio.sleep(0.02)


@pytest.fixture
def postgres_url(server_url: str) -> str:
    """Over TCP."""
    return server_url


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.05)


@at_once
async def test_a_claim_that_comes_late_takes_nothing(database_url: str, tmp_path: Path) -> None:
    script = Script()
    async with stalled(database_url, tmp_path, script, fenced=True):
        await performed(script, within_s=25)


@at_once
async def test_twin_without_the_generation_it_is_held_for_good(
    database_url: str, tmp_path: Path
) -> None:
    script = Script()
    async with stalled(database_url, tmp_path, script, fenced=False) as direct:
        with pytest.raises(TimeoutError):
            await performed(script, within_s=2)
        assert len((await PostgresEffects(direct).holding(WORKER)).claims) == 1


async def test_the_check_finds_a_claim_however_it_came_about(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "CHECK_S", 1.0)
    script = Script()
    async with stalled(database_url, tmp_path, script, fenced=False):
        await performed(script, within_s=60)


async def test_giving_back_waits_for_a_claim_that_is_under_way(database: Database) -> None:
    """The claim is in its transaction, the generation is raised: what it took is given back."""
    effects = PostgresEffects(database)
    await effects.register(WORKER, host="h", pid=1, lease_s=600)
    await _asked(database)
    async with database.lazy.acquire() as connection, connection.transaction():
        taken = await connection.fetch(
            "select * from claim_effects($1, $2, $3, 10, 0)", WORKER, ["control"], ["sync"]
        )
        assert len(taken) == 1
        disowning = asyncio.ensure_future(effects.disown(WORKER, generation=0, keep=[]))
        while not await database.durable.fetchval(
            "select count(*) from pg_locks where not granted"
        ):
            await asyncio.sleep(0.01)
    assert await disowning == 1
    assert (await effects.holding(WORKER)).claims == {}
