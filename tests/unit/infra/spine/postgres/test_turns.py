"""Callers get a connection in the order in which they ask for one."""

import asyncio
import random
from typing import Any

import pytest

from infra.spine.postgres import pool
from infra.spine.postgres.pool import Pool, connect

pytestmark = pytest.mark.postgres

CALLERS, CALLS = 16, 100
LONGEST_PAUSE_S = 0.002


async def waits(database: Pool) -> list[int]:
    """Let callers use one connection again and again. Returns how many calls of others each call let
    pass."""
    passed, done, chance = [], 0, random.Random(1)

    async def call() -> None:
        nonlocal done
        for _ in range(CALLS):
            await asyncio.sleep(chance.random() * LONGEST_PAUSE_S)
            before = done
            await database.fetchval("select 1")
            passed.append(done - before)
            done += 1

    await asyncio.gather(*(call() for _ in range(CALLERS)))
    return passed


async def test_no_caller_lets_others_pass_that_asked_later(database_url: str) -> None:
    async with connect(database_url, size=1) as database:
        assert max(await waits(database.lazy)) < CALLERS


async def test_without_turns_some_caller_waits_much_longer(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def take(self: Any) -> Any:
        self._turns._value += 1
        return await self._pool.acquire(timeout=pool.CONNECT_S)

    monkeypatch.setattr(Pool, "_take", take)
    async with connect(database_url, size=1) as database:
        assert max(await waits(database.lazy)) > CALLERS


async def test_a_call_that_is_cancelled_while_it_waits_keeps_no_turn(database_url: str) -> None:
    async with connect(database_url, size=1) as database, database.lazy.acquire():
        waiting = asyncio.create_task(database.lazy.fetchval("select 1"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with connect(database_url, size=1) as database:
        async with database.lazy.acquire():
            waiting = asyncio.create_task(database.lazy.fetchval("select 1"))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert await asyncio.wait_for(database.lazy.fetchval("select 1"), 5) == 1
