"""Postgres for a test session: the embedded default, a real server, and a fresh database per test.

The server is the one that HEADRACE_TEST_POSTGRES names, else one started from Debian's package. If
neither is available, the tests that need it are skipped, and in CI they fail.
"""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest

from infra.operations.local import embedded_postgres
from infra.spine.postgres.migrate import migrate
from infra.spine.postgres.pool import Database, connect
from tests.stack.postgres import PostgresServer, install, postgres_server


def missing(what: str) -> None:
    """Skip the test with a message that names the missing program. In CI the test fails instead. Never
    returns."""
    if os.environ.get("CI"):
        pytest.fail(f"CI must have it: {what}")
    pytest.skip(what)


@pytest.fixture(scope="session")
def postgres_url(embedded_url: str) -> str:
    """The server that tests use unless they say otherwise: the embedded default."""
    return embedded_url


@pytest.fixture(scope="session")
def embedded_url() -> Iterator[str]:
    """The URL of an embedded server that this session started."""
    with quick_directory() as directory:
        home = directory / "home"
        if os.geteuid() == 0:  # else its data would lie below /var/lib/headrace
            home.mkdir()
            (home / embedded_postgres.LINK).symlink_to(directory / "data")
        server = embedded_postgres.start(home)
        _write_lazily(server.url)
        yield server.url
        server.stop()
        embedded_postgres.remove(home)


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The URL of a PostgreSQL server (its superuser, its database `postgres`)."""
    if given := os.environ.get("HEADRACE_TEST_POSTGRES"):
        yield given
        return
    need_programs()
    with quick_directory() as directory, postgres_server(data=directory / "data") as server:
        _write_lazily(server.url)
        yield server.url


MEMORY = Path("/dev/shm")
ROOM = 2**31
"""The free bytes of memory from which on servers keep their data there. A session needs about 300 MB."""


@contextmanager
def quick_directory() -> Iterator[Path]:
    """A directory in memory if there is room, else on the disk. A database consists of 600 files, and
    some file systems need 0.3 s of CPU to copy them."""
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM
    with tempfile.TemporaryDirectory(dir=MEMORY if roomy else None) as directory:
        Path(directory).chmod(0o711)  # as root, the server is another user
        yield Path(directory)


def _write_lazily(url: str) -> None:
    """Let a server that no test crashes leave it to the system when bytes reach the disk. Each of 670
    tests drops its database, and the checkpoint for that took a second."""
    for statement in ("alter system set fsync = off", "select pg_reload_conf()"):
        asyncio.run(execute(url, statement))


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that this test may stop, crash and start again."""
    need_programs()
    with quick_directory() as directory, postgres_server(data=directory / "data") as server:
        yield server


def need_programs() -> Path:
    """The directory of a PostgreSQL server's programs, or a skip."""
    found = install()
    if found is None:
        missing("no PostgreSQL server: apt-get install postgresql, or set HEADRACE_TEST_POSTGRES")
    assert found is not None
    return found


@pytest.fixture
def database_url(postgres_url: str) -> Iterator[str]:
    """A database of this test's own, at the newest schema."""
    with fresh_database(postgres_url) as url:
        yield url


@contextmanager
def fresh_database(postgres_url: str) -> Iterator[str]:
    """A database at the newest schema, dropped at the end. It is a copy of one that this process has
    migrated once on the server, because the migrations take three times as long as a copy."""
    with new_database(postgres_url, template=TEMPLATE) as url:
        yield url


@contextmanager
def bare_database(postgres_url: str) -> Iterator[str]:
    """A database without any schema, dropped at the end."""
    with new_database(postgres_url, template="template1") as url:
        yield url


@contextmanager
def new_database(postgres_url: str, *, template: str) -> Iterator[str]:
    """A copy of the database `template` of this server, dropped at the end."""
    name = f"t{uuid4().hex[:12]}"
    asyncio.run(copy_database(postgres_url, template, name))
    yield database_of(postgres_url, name)
    asyncio.run(execute(postgres_url, f"drop database {name} with (force)"))


TEMPLATE = f"template_{uuid4().hex[:12]}"
"""The migrated database of this process on each server that it uses. Nobody opens it."""


async def copy_database(postgres_url: str, template: str, name: str) -> None:
    """Copy a database. A server that lacks the migrated one gets it first."""
    # Copying files takes a fifth of the time of copying block by block through the write-ahead log.
    copy = f"create database {name} template {template} strategy file_copy"
    try:
        await execute(postgres_url, copy)
    except asyncpg.InvalidCatalogNameError:
        if template != TEMPLATE:
            raise
        await execute(postgres_url, f"create database {TEMPLATE}")
        await migrate(database_of(postgres_url, TEMPLATE))
        await execute(postgres_url, copy)


def database_of(url: str, name: str) -> str:
    """The URL of another database of the same server."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}/{name}" + (f"?{parts.query}" if parts.query else "")


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with open_database(database_url) as found:
        yield found


@asynccontextmanager
async def open_database(url: str) -> AsyncIterator[Database]:
    async with connect(url) as found:
        yield found


async def execute(url: str, sql: str) -> None:
    """Run one statement on a connection of its own."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


def dump_and_restore(source: str, target: str, file: Path) -> None:
    """Copy a database by pg_dump and pg_restore, as an operator would, through `file`."""
    programs = need_programs()
    for command in (
        [programs / "pg_dump", "--format=custom", f"--file={file}", source],
        [programs / "pg_restore", "--no-owner", f"--dbname={target}", file],
    ):
        # A cluster that never saw Headrace has no role to grant to: pg_restore says so and goes on.
        done = subprocess.run([str(part) for part in command], capture_output=True, check=False)
        said = done.stderr.decode()
        assert done.returncode == 0 or "headrace_worker" in said, said
