"""B3, durable events: Headrace, Procrastinate and DBOS do the same durable work, on the same Postgres,
in the same run.

The work has three durable facts per message. The message is durable before its sender goes on. A worker
decides on it, and the decision is durable. The decision is performed, and the outcome is durable.
(Headrace also writes events of the log, inbox, effect, claim and lease.) One process sends, 32 messages
at once, and another works. First all run as fast as they can (A B C C B A), then at the same steady
pace. `done` is the time from the request until the last fact is durable. CPU is that of both processes
and of Postgres. `three commits` is the lower bound for all of them at that pace: three one-row
transactions, one after the other, and nothing else. Time that is slow there is the disk's.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import psutil

from bench.durable_ours import Headrace
from bench.durable_theirs import AT_ONCE, Dbos, Procrastinate
from infra.operations.local import embedded_postgres

ROOT = Path(__file__).resolve().parents[1]
SIDES: dict[str, Any] = {"headrace": Headrace(), "procrastinate": Procrastinate(), "dbos": Dbos()}
FACTS = 3
WARM = 50
WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Measured:
    """`per_s` messages were done; `times` from request to done, in seconds; CPU-seconds a message."""

    per_s: float
    times: list[float]
    cpu_s: float

    @property
    def p50_ms(self) -> float:
        return statistics.median(self.times) * 1e3

    @property
    def p99_ms(self) -> float:
        return sorted(self.times)[int(len(self.times) * 0.99)] * 1e3


async def work(side: str, url: str) -> dict[str, float]:
    """The worker's process until SIGTERM: when each message was done."""
    done: dict[str, float] = {}
    task = asyncio.ensure_future(SIDES[side].work(url, done, lambda: print("ready", flush=True)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.wait([task])
    return done


@contextmanager
def worker(side: str, url: str, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.b3_events", "--work", side, url, str(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", f"{side} did not start"
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


async def send_messages(ask: Any, messages: list[str], *, per_s: float | None) -> dict[str, float]:
    """Send all, at most 32 at once, each not before it is due; returns from when each counts: what
    had to wait for its turn counts from when it was due."""
    began: dict[str, float] = {}
    free = asyncio.Semaphore(AT_ONCE)
    first = time.monotonic()

    async def one(number: int, message: str) -> None:
        if per_s is not None:
            began[message] = first + number / per_s
            await asyncio.sleep(max(0.0, began[message] - time.monotonic()))
        async with free:
            began.setdefault(message, time.monotonic())
            await ask(message)

    await asyncio.gather(*(one(number, message) for number, message in enumerate(messages)))
    return began


async def measure(
    server: embedded_postgres.EmbeddedPostgres, side: str, count: int, per_s: float | None
) -> Measured:
    """One side in a database of its own."""
    admin = await asyncpg.connect(server.url)
    name = f"b3_{uuid4().hex[:8]}"
    await admin.execute(f"create database {name}")
    url = server.url.replace("/postgres?", f"/{name}?")
    assert url != server.url, server.url
    await SIDES[side].prepare(url)
    looker = await asyncpg.connect(url)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "done.json"
        with worker(side, url, out) as process:
            async with SIDES[side].client(url) as ask:
                await send_messages(ask, [uuid4().hex for _ in range(WARM)], per_s=None)
                await wait_until_done(looker, side, WARM)
                messages = [uuid4().hex for _ in range(count)]
                spent = cpu(process.pid, server)
                began = await send_messages(ask, messages, per_s=per_s)
                await wait_until_done(looker, side, WARM + count)
                spent = cpu(process.pid, server) - spent
        done: dict[str, float] = json.loads(await asyncio.to_thread(out.read_text))
    await looker.close()
    await admin.execute(f"drop database {name} with (force)")
    await admin.close()
    times = [done[message] - at for message, at in began.items()]
    took = max(done[m] for m in messages) - min(began.values())
    return Measured(count / took, times, spent / count)


async def commits(server: embedded_postgres.EmbeddedPostgres, count: int, per_s: float) -> Measured:
    """Three bare transactions in a row, so often, each row of three begun when it is due."""
    async with asyncpg.create_pool(server.url, min_size=8, max_size=8) as pool:
        await pool.execute("create table floor (n integer)")
        first = time.monotonic()

        async def one(number: int) -> float:
            due = first + number / per_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            async with pool.acquire() as connection:
                for _ in range(FACTS):
                    await connection.execute("insert into floor values (1)")
            return time.monotonic() - due

        times = list(await asyncio.gather(*(one(number) for number in range(count))))
        await pool.execute("drop table floor")
    return Measured(per_s, times, 0.0)


async def wait_until_done(looker: Any, side: str, count: int) -> None:
    """Until so many messages are done, by what the database holds."""
    deadline = time.monotonic() + WITHIN_S
    while await looker.fetchval(SIDES[side].done_sql) < count:
        assert time.monotonic() < deadline, f"{side} did not finish"
        await asyncio.sleep(0.2)


def cpu(pid: int, server: embedded_postgres.EmbeddedPostgres) -> float:
    """CPU-seconds so far: the worker, this process, and Postgres with all it ever started."""
    total = sum(os.times()[:2])
    for process in (psutil.Process(pid), *postgres(server)):
        times = process.cpu_times()
        total += times.user + times.system
    main = postgres(server)[0].cpu_times()
    return total + main.children_user + main.children_system


def postgres(server: embedded_postgres.EmbeddedPostgres) -> list[psutil.Process]:
    """Its postmaster, which counts what its children that ended have spent, and the living ones."""
    main = psutil.Process(server.process.pid)
    return [main, *main.children(recursive=True)]


def show(what: str, side: str, found: list[Measured]) -> None:
    per_s = statistics.median(one.per_s for one in found)
    times = [t for one in found for t in one.times]
    whole = Measured(per_s, times, statistics.median(one.cpu_s for one in found))
    print(
        f"{what:14}{SIDES[side].name:15}{per_s:12,.0f}{FACTS * per_s:12,.0f}"
        f"{whole.p50_ms:10.1f}{whole.p99_ms:10.1f}{whole.cpu_s * 1e3:12.2f}",
        flush=True,
    )


async def main(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        server = await asyncio.to_thread(embedded_postgres.start, Path(directory))
        try:
            await table(server, given)
        finally:
            server.stop()


async def table(server: embedded_postgres.EmbeddedPostgres, given: argparse.Namespace) -> None:
    names = [name for name in SIDES if name in given.sides]
    for name in [name for name in names[:] if name != "headrace" and find_spec(name) is None]:
        print(f"without {name}, which `make oracles` installs")
        names.remove(name)
    versions = ", ".join(f"{n} {version(n)}" for n in names if n != "headrace")
    print(f"B3 durable events, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; {versions}")
    heads = ("messages/s", "events/s")
    print(f"{'':14}{'':15}" + "".join(f"{h:>12}" for h in heads), end="")
    print(f"{'p50 ms':>10}{'p99 ms':>10}{'CPU ms/msg':>12}")
    found: dict[str, list[Measured]] = {name: [] for name in names}
    for side in (*names, *reversed(names)):
        count = given.messages if side == "headrace" else given.messages // 4
        found[side].append(await measure(server, side, count, None))
    for side in names:
        show("flat out", side, found[side])
    for side in names:
        paced = await measure(server, side, int(given.pace * given.seconds), given.pace)
        show(f"{given.pace:.0f}/s", side, [paced])
    floor = await commits(server, int(given.pace * given.seconds), given.pace)
    print(
        f"{f'{given.pace:.0f}/s':14}{'three commits':15}{'':24}{floor.p50_ms:10.1f}{floor.p99_ms:10.1f}"
    )
    fast = given.fast_events / FACTS
    if "headrace" in names:
        paced = await measure(server, "headrace", int(fast * given.seconds), fast)
        show(f"{fast:.0f}/s", "headrace", [paced])
    if "headrace" in names:
        ours = statistics.median(one.per_s for one in found["headrace"])
        for side in names[1:]:
            theirs = statistics.median(one.per_s for one in found[side])
            print(f"Headrace does {ours / theirs:.1f} x what {SIDES[side].name} does")
    print(f"load at the end {os.getloadavg()[0]:.1f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=6000, help="flat out; a quarter for others")
    parser.add_argument("--pace", type=float, default=50.0, help="messages/s that all can do")
    parser.add_argument("--fast-events", type=float, default=2500.0, help="events/s, Headrace only")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long a pace is held")
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=tuple(SIDES))
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    asked = arguments()
    if asked.work:
        side, url, out = asked.work
        Path(out).write_text(json.dumps(asyncio.run(work(side, url))))
        os._exit(0)  # whatever threads somebody's library still has
    else:
        asyncio.run(main(asked))
