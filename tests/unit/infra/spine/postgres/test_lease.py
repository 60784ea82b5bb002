"""A process whose lease expired ends, whatever its event loops do."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from uuid import uuid4

import pytest

from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.history import History
from infra.spine.postgres.lease import LEASE_LOST, LeaseKeeper
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


class Forgetful:
    """A database without this worker's lease, until the worker is registered. With `replaced` it is
    another one than before, which no failed statement has shown."""

    def __init__(self, *, replaced: bool) -> None:
        self.history = History()
        self._replaced = replaced
        self._registered = False

    async def renew(self, worker: WorkerId, *, lease_s: float) -> bool:
        self.history.history_epoch += self._replaced and not self._registered
        return self._registered

    async def register(self, worker: WorkerId, **_: Any) -> None:
        self._registered = True


async def renewed(effects: Forgetful) -> bool:
    """Whether a worker keeps its lease with this database."""
    keeper = LeaseKeeper("", WorkerId("w"), on_beat=lambda: None, on_lost=lambda: None)
    return await keeper._renew(cast("PostgresEffects", effects))


async def test_a_worker_registers_again_in_a_database_that_was_replaced_unnoticed() -> None:
    assert await renewed(Forgetful(replaced=True))


async def test_twin_in_the_same_database_its_lease_is_lost() -> None:
    assert not await renewed(Forgetful(replaced=False))
