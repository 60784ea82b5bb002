"""A process whose lease expired ends, whatever its event loops do."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest

from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.lease import LEASE_LOST
from infra.spine.postgres.pool import Database
from schemas.ids import WorkerId

pytestmark = [pytest.mark.postgres, pytest.mark.processes]

PROCESS = """
import asyncio, sys, time
from infra.spine.postgres import lease

lease.LEAVE_S = 0.2

async def main():
    overdue = lease.leave if sys.argv[3] == "leaves" else None
    keeper = lease.LeaseKeeper(
        sys.argv[1], sys.argv[2], on_beat=lambda: None, on_lost=lambda: None, on_overdue=overdue
    )
    await keeper.start()
    print("at work", flush=True)
    while True:  # its loop turns no more
        time.sleep(1)

asyncio.run(main())
"""


@contextmanager
def deaf(url: str, worker: str, how: str) -> Iterator["subprocess.Popen[str]"]:
    """A process with a lease whose event loop is blocked."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, url, worker, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_a_lost_lease_ends_a_process_that_does_nothing_about_it(database: Database) -> None:
    worker = WorkerId(uuid4().hex)
    with deaf(database.url, worker, "leaves") as process:
        await PostgresEffects(database).expire(worker)
        assert await asyncio.to_thread(process.wait, 60) == LEASE_LOST
        assert process.stderr is not None
        assert "the lease ran out" in process.stderr.read()


async def test_twin_without_it_the_process_stays(database: Database) -> None:
    worker = WorkerId(uuid4().hex)
    with deaf(database.url, worker, "stays") as process:
        await PostgresEffects(database).expire(worker)
        with pytest.raises(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, 4)
