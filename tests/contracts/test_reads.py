"""A decision holds for the stream versions that it was made on until it is written: which
transaction waits for which."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

from infra.spine.ports.event_log import Commit, CommitMiss
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database
from schemas.ids import StreamName
from tests.contracts.event_log_suite import stream_of, warning
from tests.contracts.test_claims import until_it_waits
from tests.crash.test_twins import switched_off
from tests.kit.commits import commit_of

pytestmark = pytest.mark.postgres

CHECKED = "raise exception '%', p_streams[i] using errcode = 'HR001';"


@dataclass
class Bench:
    """A log, and two sessions that write to its database."""

    database: Database
    log: PostgresLog
    first: PostgresLog
    second: PostgresLog

    @asynccontextmanager
    async def open(self, commit: Commit) -> AsyncIterator[None]:
        """The first writer has made this write and does not commit it until the block ends."""
        session: Any = self.first._pool
        async with session.transaction():
            await self.first.commit(commit)
            yield

    async def waits(self, commit: Commit) -> "asyncio.Task[Any]":
        """Start this write in the second session, and return once it waits for another
        transaction."""
        task = asyncio.ensure_future(self.second.commit(commit))
        session: Any = self.second._pool
        await until_it_waits(self.database, session.get_server_pid())
        return task


@pytest.fixture
async def bench(database: Database) -> AsyncIterator[Bench]:
    async with (
        Notifier(database) as notifier,
        database.durable.acquire() as one_session,
        database.durable.acquire() as other_session,
    ):
        first, second = PostgresLog(database, notifier), PostgresLog(database, notifier)
        first._pool, second._pool = one_session, other_session
        yield Bench(database, PostgresLog(database, notifier), first, second)


def read(stream: StreamName, version: int) -> Commit:
    """An empty decision that was made on a stream."""
    return Commit(expected={stream: version})


async def test_readers_do_not_wait_for_one_another(bench: Bench) -> None:
    stream = await stream_of(bench.log, 2)
    async with bench.open(read(stream, 2)), asyncio.timeout(60):
        await bench.second.commit(read(stream, 2))


async def test_an_append_waits_for_a_decision_on_the_stream(bench: Bench) -> None:
    stream = await stream_of(bench.log, 1)
    async with bench.open(read(stream, 1)):
        appending = await bench.waits(commit_of(warning(stream[4:], 2), 2))
    await appending
    assert (await bench.log.versions([stream]))[stream] == 2


async def test_a_decision_on_a_stream_that_moves_before_it_commits_is_stale(bench: Bench) -> None:
    stream = await stream_of(bench.log, 1)
    async with bench.open(commit_of(warning(stream[4:], 2), 2)):
        reading = await bench.waits(read(stream, 1))
    with pytest.raises(CommitMiss) as miss:
        await reading
    assert (miss.value.kind, miss.value.what) == ("stale", stream)


async def test_the_first_append_waits_for_a_decision_on_the_empty_stream(
    bench: Bench,
) -> None:
    first = warning(uuid4().hex, 1)
    async with bench.open(read(first.stream, 0)):
        creating = await bench.waits(commit_of(first, 1))
    (created,) = await creating
    assert created.version == 1


async def test_a_decision_on_an_empty_stream_is_stale_once_the_stream_is_created(
    bench: Bench,
) -> None:
    first = warning(uuid4().hex, 1)
    async with bench.open(commit_of(first, 1)):
        reading = await bench.waits(read(first.stream, 0))
    with pytest.raises(CommitMiss) as miss:
        await reading
    assert (miss.value.kind, miss.value.what) == ("stale", first.stream)


async def test_two_may_decide_at_once_that_there_is_none(bench: Bench) -> None:
    stream = StreamName(f"run-{uuid4().hex}")
    async with bench.open(read(stream, 0)):
        reading = await bench.waits(read(stream, 0))
    await reading
    await bench.log.commit(read(stream, 0))


async def test_twin_without_the_check_a_stale_decision_is_written(bench: Bench) -> None:
    await switched_off(bench.database.url, CHECKED)
    stream = await stream_of(bench.log, 2)
    await bench.log.commit(Commit(expected={stream: 1}))
