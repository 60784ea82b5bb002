"""An advisory lock in a database session of its own, for work that only one process may do at a time.

A process that is frozen (stopped, or on a machine that swaps) keeps its connections, and with them its
locks. So a session that leads says every few seconds that its process runs, and the server ends a
session that is silent for longer. Then another process leads, and the frozen one has lost its session
when it runs again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from infra.spine.postgres.errors import translating_errors
from infra.spine.postgres.pool import open_session
from infra.task_cancellation import run_together
from schemas.errors import TransientError

LOOK_EVERY_S = 0.2

FROZEN_S = 20.0
"""After how many silent seconds the server ends the session of a process that leads."""

BEAT_S = 4.0
"""How often such a process says that it runs."""

Check = Callable[[], Awaitable[None]]


@asynccontextmanager
async def exclusively(url: str, lock: int, *, within_s: float) -> AsyncIterator[Check]:
    """Hold an advisory lock inside the block. What it yields checks that the lock is still held, and
    raises DatabaseUnavailable when its session is lost. Raises TransientError when another session still
    holds it after `within_s` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    session = await open_session(url, "headrace lock")
    try:
        with translating_errors():
            while not await session.fetchval("select pg_try_advisory_lock($1)", lock):
                if loop.time() > deadline:
                    raise TransientError(
                        "another process collects or restores blobs at this moment; try again"
                    )
                await asyncio.sleep(LOOK_EVERY_S)
        yield partial(_check, session)
    finally:
        session.terminate()


async def lead(url: str, lock: int, work: Callable[[], Awaitable[None]]) -> None:
    """Wait until no other process holds an advisory lock, and do `work` for as long as this one holds
    it. Raises DatabaseUnavailable when the lock is lost, once the work is cancelled."""
    session = await open_session(url, "headrace lock")
    try:
        with translating_errors():
            await session.execute(f"set idle_session_timeout = {idle_timeout_ms()}")
            while not await session.fetchval("select pg_try_advisory_lock($1)", lock):  # noqa: ASYNC110 - no event can come from another machine
                await asyncio.sleep(LOOK_EVERY_S)
        await run_together(work(), _beat(session))
    finally:
        session.terminate()


def idle_timeout_ms() -> int:
    """The setting `idle_session_timeout` of a session that leads."""
    return round(FROZEN_S * 1000)


async def _check(session: Any) -> None:
    with translating_errors():
        await session.execute("select 1", timeout=FROZEN_S)


async def _beat(session: Any) -> None:
    """Say that this process runs, until the session is lost."""
    with translating_errors():
        while True:
            await asyncio.sleep(BEAT_S)
            await session.execute("select 1", timeout=FROZEN_S)
