"""Connections to Postgres: one pool whose commits wait for the disk, one whose commits need not.

`lazy` is for claims, leases, watermarks, projections and wake-ups: losing the last of those in a power
cut costs time. Appends always go through `durable`: the bus could publish what a crash then removes.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from schemas.errors import TransientError

Pool = Any
"""asyncpg ships no types; its pools and records are Any at this one border."""

IDLE_IN_TRANSACTION = "30s"
"""An idle transaction anywhere stalls the log's horizon: the server ends it."""


@dataclass(frozen=True, slots=True)
class Database:
    """The two pools over one database."""

    url: str
    durable: Pool
    lazy: Pool


@asynccontextmanager
async def connect(url: str, *, size: int = 6) -> AsyncIterator[Database]:
    """Open both pools. Raises TransientError when the server does not answer."""
    try:
        durable = await _pool(url, size=size, synchronous_commit="on")
    except (OSError, asyncpg.PostgresError) as error:
        raise TransientError(f"no Postgres answers at HEADRACE_DATABASE_URL: {error}") from error
    lazy = await _pool(url, size=size, synchronous_commit="off")
    try:
        yield Database(url=url, durable=durable, lazy=lazy)
    finally:
        durable.terminate()
        lazy.terminate()


async def _pool(url: str, *, size: int, synchronous_commit: str) -> Pool:
    return await asyncpg.create_pool(
        url,
        min_size=1,
        max_size=size,
        command_timeout=60,
        server_settings={
            "application_name": "headrace",
            "synchronous_commit": synchronous_commit,
            "idle_in_transaction_session_timeout": IDLE_IN_TRANSACTION,
            "jit": "off",
        },
    )
