"""A worker keeps its lease while code in C holds the interpreter's lock, and loses it when it is
stopped. Each test waits for leases, so all wait at once."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from infra.spine.postgres.lease import LEASE_S
from infra.spine.postgres.lease_renewer import is_running
from infra.spine.postgres.pool import Database
from tests.kit.at_once import AtOnce
from tests.kit.postgres import open_database

pytestmark = [pytest.mark.postgres, pytest.mark.processes]

at_once = AtOnce()

BLOCKED_S = 2 * LEASE_S
WITHIN_S = 60.0

PROCESS = """
import asyncio, ctypes, sys, time
from infra.spine.postgres import lease

if sys.argv[4] == "thread":
    lease.LeaseRenewal.beat = lambda self: None

def block(seconds):
    # No other thread runs in here: a PyDLL keeps the lock while its function runs.
    ctypes.PyDLL(None).poll(None, 0, int(1000 * seconds))

async def main():
    keeper = lease.LeaseKeeper(
        sys.argv[1], sys.argv[2], on_beat=lambda: None, on_lost=lambda: None
    )
    await keeper.start()
    time.sleep(2.0)
    print("blocked", flush=True)
    block(float(sys.argv[3]))
    print("free", flush=True)
    while True:
        await asyncio.sleep(1.0)
        print("lost" if keeper.lost else "kept", flush=True)

asyncio.run(main())
"""


class Worker:
    """A process with a lease."""

    def __init__(self, database: Database, process: asyncio.subprocess.Process, name: str) -> None:
        self._database = database
        self._process = process
        self._name = name
        self.pid = process.pid

    async def says(self) -> str:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), WITHIN_S)
        return line.decode().strip()

    async def says_at_last(self, line: str) -> None:
        async with asyncio.timeout(WITHIN_S):
            while await self.says() != line:
                pass

    async def left_s(self) -> float:
        """The seconds until its lease expires."""
        left: float = await self._database.lazy.fetchval(
            "select extract(epoch from expires_at - clock_timestamp())::float8 from workers"
            " where id = $1",
            self._name,
        )
        return left

    async def expires(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            while await self.left_s() > 0:
                await asyncio.sleep(0.2)


@asynccontextmanager
async def at_work(url: str, *, blocked_s: float, renewed_by: str) -> AsyncIterator[Worker]:
    name = uuid4().hex
    arguments = (url, name, str(blocked_s), renewed_by)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS, *arguments, stdout=subprocess.PIPE
    )
    try:
        async with open_database(url) as database:
            worker = Worker(database, process, name)
            assert await worker.says() == "blocked"
            yield worker
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def helpers_of(pid: int) -> list[int]:
    """The renewing processes of a worker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            found.append(int(path.parent.name))
    return found


@at_once
async def test_a_worker_whose_interpreter_is_held_up_keeps_its_lease(database_url: str) -> None:
    async with at_work(database_url, blocked_s=BLOCKED_S, renewed_by="process") as worker:
        began, least_s = time.monotonic(), 5.0
        free = asyncio.ensure_future(worker.says())
        while not free.done():
            least_s = min(least_s, await worker.left_s())
            await asyncio.sleep(0.1)
        assert free.result() == "free"
        assert time.monotonic() - began > BLOCKED_S / 2
        assert least_s > 0
        assert [await worker.says() for _ in range(3)] == ["kept"] * 3


@at_once
async def test_twin_a_thread_alone_loses_it(database_url: str) -> None:
    async with at_work(database_url, blocked_s=BLOCKED_S, renewed_by="thread") as worker:
        await worker.expires()
        await worker.says_at_last("lost")


@at_once
async def test_a_worker_that_is_stopped_loses_its_lease(database_url: str) -> None:
    async with at_work(database_url, blocked_s=0.1, renewed_by="process") as worker:
        assert await worker.says() == "free"
        (helper,) = helpers_of(worker.pid)
        os.kill(worker.pid, signal.SIGSTOP)
        async with asyncio.timeout(WITHIN_S):
            while is_running(worker.pid):  # a signal to a process on another core takes a moment
                await asyncio.sleep(0.01)
        await worker.expires()
        assert is_running(helper)
        os.kill(worker.pid, signal.SIGCONT)
        await worker.says_at_last("lost")


@at_once
async def test_the_process_ends_with_its_worker(database_url: str) -> None:
    async with at_work(database_url, blocked_s=0.1, renewed_by="process") as worker:
        assert await worker.says() == "free"
        (helper,) = helpers_of(worker.pid)
        os.kill(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(WITHIN_S):
            while is_running(helper):
                await asyncio.sleep(0.1)


@at_once
async def test_a_dead_process_is_replaced(database_url: str) -> None:
    async with at_work(database_url, blocked_s=0.1, renewed_by="process") as worker:
        assert await worker.says() == "free"
        (first,) = helpers_of(worker.pid)
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(WITHIN_S):
            while helpers_of(worker.pid) in ([], [first]):
                await asyncio.sleep(0.1)
        assert await worker.says() == "kept"
