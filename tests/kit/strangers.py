"""Senders without an API key that load a control process, and what a valid client sees meanwhile."""

import asyncio
import os
import resource
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from infra.identity.api_key_format import issue_api_key
from infra.operations.local.free_port import free_port
from tests.kit.platform import ROOT, eventually, is_ready

API_KEY = "the-operators-api-key"
MIB = 1 << 20


@dataclass
class ControlProcess:
    """A control process without workers, over a database that is prepared."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def memory(self) -> int:
        """Its resident memory, in bytes."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def cpu_s(self) -> float:
        """The processor seconds that it has used."""
        return float(sum(psutil.Process(self.process.pid).cpu_times()[:2]))

    @property
    def num_log_lines(self) -> int:
        return len(self.log.read_bytes().splitlines())


@contextmanager
def control_process(
    database_url: str, directory: Path, **settings: str
) -> Iterator[ControlProcess]:
    """Run `python -m producers.serve` with these settings until the block ends."""
    port = free_port()
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")},
        "HEADRACE_HOME": str(directory / "home"),
        "HEADRACE_URL": f"http://127.0.0.1:{port}",
        "HEADRACE_DATABASE_URL": database_url,
        "HEADRACE_API_KEY": API_KEY,
        "PYTHONPATH": str(ROOT),
        **settings,
    }
    (directory / "home").mkdir()
    log = directory / "control.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "producers.serve"],
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=2) as asker:
            eventually(lambda: is_ready(asker), within_s=60, what="the control process is ready")
        yield ControlProcess(port, process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


@dataclass
class Observed:
    """What a valid client, which keeps its connection, and a stranger that asks for `/readyz` on a new
    connection each time saw: the seconds of each answer, and the statuses."""

    client_s: list[float] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    most_memory: int = 0

    def p99(self, times: list[float]) -> float:
        return statistics.quantiles(times, n=100)[98] if len(times) > 1 else max(times)


@asynccontextmanager
async def observing(control: ControlProcess) -> AsyncIterator[Observed]:
    """Ask as a valid client and for `/readyz` until the block ends."""
    found = Observed()
    tasks = [
        asyncio.ensure_future(_ask_as_client(control, found)),
        asyncio.ensure_future(_ask_ready(control, found)),
    ]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error


@asynccontextmanager
async def half_open(control: ControlProcess, count: int) -> AsyncIterator[None]:
    """Connections that send a part of a head, and open again when they are closed."""
    raise_file_limit()
    tasks = [asyncio.ensure_future(_stay_half_open(control.port)) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def send_bodies(control: ControlProcess, count: int, size: int) -> Counter[int]:
    """Send bodies without an API key, all at once. Returns how often each status came; 0 stands for
    a connection that was reset."""
    statuses = await asyncio.gather(*(_send_body(control.port, size) for _ in range(count)))
    return Counter(statuses)


async def send_bad_keys(
    control: ControlProcess, *, seconds: float, at_once: int, well_formed: bool
) -> Counter[int]:
    """Send requests with bad API keys as fast as possible. Returns how often each status came."""
    found: Counter[int] = Counter()
    until = time.monotonic() + seconds
    await asyncio.gather(
        *(_send_api_keys(control.port, until, found, well_formed) for _ in range(at_once))
    )
    return found


def raise_file_limit() -> None:
    """Let this process open as many files as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _ask_as_client(control: ControlProcess, found: Observed) -> None:
    async with _connection(control.port) as (reader, writer):
        while True:
            began = time.perf_counter()
            writer.write(_request("GET", "/api/v1/runs", API_KEY))
            found.statuses[await _read_answer(reader)] += 1
            found.client_s.append(time.perf_counter() - began)
            found.most_memory = max(found.most_memory, control.memory)
            await asyncio.sleep(0.02)


async def _ask_ready(control: ControlProcess, found: Observed) -> None:
    while True:
        began = time.perf_counter()
        found.statuses[await _ask_once(control.port, _request("GET", "/readyz", ""))] += 1
        found.ready_s.append(time.perf_counter() - began)
        await asyncio.sleep(0.05)


async def _stay_half_open(port: int) -> None:
    while True:
        try:
            async with _connection(port) as (reader, writer):
                writer.write(b"GET /api/v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
                await reader.read()
        except OSError:
            await asyncio.sleep(0.1)


async def _send_body(port: int, size: int) -> int:
    head = (
        "POST /api/v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\n\r\n"
    )
    try:
        async with _connection(port) as (reader, writer):
            writer.write(head.encode())
            piece = b"x" * (64 << 10)
            for _ in range(size // len(piece)):
                writer.write(piece)
                await writer.drain()
            return await _read_answer(reader)
    except (OSError, asyncio.IncompleteReadError):
        return 0


async def _send_api_keys(port: int, until: float, found: Counter[int], well_formed: bool) -> None:
    while time.monotonic() < until:
        api_key = issue_api_key().text if well_formed else f"hr_{secrets.token_hex(5)}_{'x' * 49}"
        try:
            found[await _ask_once(port, _request("GET", "/api/v1/runs", api_key))] += 1
        except (OSError, asyncio.IncompleteReadError):
            found[0] += 1


async def _ask_once(port: int, request: bytes) -> int:
    async with _connection(port) as (reader, writer):
        writer.write(request)
        return await _read_answer(reader)


@asynccontextmanager
async def _connection(
    port: int,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


def _request(method: str, path: str, api_key: str) -> bytes:
    sent = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{sent}\r\n".encode()


async def _read_answer(reader: asyncio.StreamReader) -> int:
    """Read an answer to its end. Returns its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            await reader.readexactly(int(line.partition(b":")[2]))
    return int(head.split()[1])
