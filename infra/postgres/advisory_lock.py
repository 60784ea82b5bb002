"""An advisory lock in a database session of its own, for work that only one process may do at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from infra.postgres.errors import translating_errors
from infra.postgres.pool import open_session
from schemas.errors import TransientError

LOOK_EVERY_S = 0.2


@asynccontextmanager
async def exclusively(url: str, lock: int, *, within_s: float) -> AsyncIterator[None]:
    """Hold an advisory lock inside the block. Raises TransientError when another session still holds it
    after `within_s` seconds."""
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
        yield
    finally:
        session.terminate()
