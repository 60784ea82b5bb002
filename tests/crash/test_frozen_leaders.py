"""A process that is frozen loses the right to poll, to alert, or to publish the log: another
one takes over, and the frozen one finds that out when it runs again. The twin's server waits for it
without end."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tests.kit.at_once import AtOnce
from tests.kit.platform import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.postgres]

at_once = AtOnce()

POLLER = """
from producers.core.repositories.polling import poll_alone

class Poller:
    run = staticmethod(leading)

main = poll_alone(Poller(), url)
"""
ALERTS = """
from infra.operations.maintenance.alerts import alert_alone

class Alerts:
    run = staticmethod(leading)

main = alert_alone(Alerts(), url)
"""
RELAY = """
from contextlib import asynccontextmanager
from infra.spine.bus.relay import Relay

@asynccontextmanager
async def connect():
    await leading()
    yield

main = Relay(url, None, None, connect=connect).run()
"""
PROGRAM = """
import asyncio, sys
from infra.spine.postgres import advisory_lock

url, patience = sys.argv[1], float(sys.argv[2])
advisory_lock.FROZEN_S, advisory_lock.BEAT_S = patience, 0.2

async def leading():
    print("leads", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("lost", flush=True)
{leader}
asyncio.run(main)
"""
FROZEN_S, NEVER_S = 2.0, 0.0
LEADERS = {"poller": POLLER, "alerts": ALERTS, "relay": RELAY}


@asynccontextmanager
async def leader(
    kind: str, url: str, *, patience_s: float
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that leads, or waits until it may."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM.format(leader=LEADERS[kind]), url, str(patience_s),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def said(process: asyncio.subprocess.Process, *, within_s: float = 60.0) -> str:
    """The next word of a process, or nothing."""
    assert process.stdout is not None
    try:
        return (await asyncio.wait_for(process.stdout.readline(), within_s)).decode().strip()
    except TimeoutError:
        return ""


async def for_each_kind(check: Callable[[str], Awaitable[None]]) -> None:
    """Check all kinds at once: each has a lock of its own, and most of a check is a wait."""
    async with asyncio.TaskGroup() as together:
        for kind in LEADERS:
            together.create_task(_naming(kind, check))


async def _naming(kind: str, check: Callable[[str], Awaitable[None]]) -> None:
    try:
        await check(kind)
    except BaseException as error:
        error.add_note(f"the kind is {kind}")
        raise


@at_once
async def test_another_process_takes_over_from_a_frozen_one(database_url: str) -> None:
    async def check(kind: str) -> None:
        async with leader(kind, database_url, patience_s=FROZEN_S) as first:
            assert await said(first) == "leads"
            async with leader(kind, database_url, patience_s=FROZEN_S) as second:
                assert await said(second, within_s=2 * FROZEN_S) == "", "the first one runs"
                first.send_signal(signal.SIGSTOP)
                assert await said(second) == "leads"
                first.send_signal(signal.SIGCONT)
                assert await said(first) == "lost"
                assert await said(second, within_s=1.0) == ""

    await for_each_kind(check)


@at_once
async def test_twin_without_the_timeout_nobody_takes_over(database_url: str) -> None:
    async def check(kind: str) -> None:
        async with leader(kind, database_url, patience_s=NEVER_S) as first:
            assert await said(first) == "leads"
            async with leader(kind, database_url, patience_s=NEVER_S) as second:
                first.send_signal(signal.SIGSTOP)
                assert await said(second, within_s=3 * FROZEN_S) == ""

    await for_each_kind(check)
