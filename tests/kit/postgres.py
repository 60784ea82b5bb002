"""One embedded Postgres for a test session, and a fresh, migrated database for each test."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from infra import embedded
from infra.database import Database, connect
from infra.migrate import migrate


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a server that this session started."""
    with tempfile.TemporaryDirectory() as home:
        server = embedded.start(Path(home))
        yield server.url
        server.stop()


@pytest.fixture
def database_url(postgres_url: str) -> Iterator[str]:
    """A database of this test's own, at the newest schema."""
    with fresh_database(postgres_url) as url:
        yield url


@contextmanager
def fresh_database(postgres_url: str) -> Iterator[str]:
    """A database at the newest schema, dropped at the end."""
    name = f"t{uuid4().hex[:12]}"
    asyncio.run(_execute(postgres_url, f"create database {name}"))
    url = postgres_url.replace("/postgres?", f"/{name}?")
    asyncio.run(migrate(url))
    yield url
    asyncio.run(_execute(postgres_url, f"drop database {name} with (force)"))


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with connected(database_url) as found:
        yield found


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Database]:
    async with connect(url) as found:
        yield found


async def _execute(url: str, sql: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(sql)
    await connection.close()
