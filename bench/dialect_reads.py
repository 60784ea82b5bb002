"""The reads before a submission by the command line `osmosis`, by 32 clients at once.

`python -m bench.dialect_reads` fills a workspace with runs and secrets and serves it from a process of
its own. 32 connections ask the same path again as soon as they are answered, and one asks for the list
of runs. It prints how long an answer takes and how much of a core's time it costs the server. Ends with
1 when a goal is missed. The clients share the machine.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer
from tests.kit.application import application
from tests.kit.postgres import execute, fresh_database
from tests.kit.tenants import ask, create_api_key, tenant
from tests.stack.postgres import postgres_server

CLIENTS, RUNS, SECRETS = 32, 10_000, 5
MOST_P95_S, MOST_CPU_S, MOST_LIST_S = 0.02, 0.01, 0.1
REPOSITORY = "acme/sums"
PATHS = {
    "verify": "/api/cli/verify",
    "workspaces": "/api/cli/workspaces",
    "secrets": "/api/cli/environment-secrets?limit=50&offset=0&scope=all",
    "train list": "/api/cli/training-runs?limit=50&offset=0",
}
LIST = "train list"
"""Reads a page of all runs by one client, with a goal of its own."""

COPY = """insert into runs select * from (select (jsonb_populate_record(r, jsonb_build_object(
    'run', 'copy-' || n, 'name', 'copied-run-' || n, 'reward', (n % 100) / 100.0,
    'created_at', r.created_at - n * interval '1 minute'))).*
    from runs r, generate_series(1, {runs}) n where r.run = '{run}') as c"""


async def serve(url: str, home: Path) -> None:
    """Serve a workspace with many runs until standard input ends. Prints the port and an API key."""
    repository = f"https://git.example/{REPOSITORY}"
    async with application(url, home, repositories=(repository,)) as app:
        found = await tenant(app, "sums", repository)
        person = await create_api_key(app, "ada", "control", workspace=found.workspace)
        for n in range(SECRETS):
            body = {"value": "0123456789", "scope": "workspace", "workspace": found.workspace}
            made = await ask(app, "PUT", f"/api/v1/secrets/KEY_{n}", found.api_key, json=body)
            if made.status_code >= 300:
                raise SystemExit(made.text)
        await execute(url, COPY.format(run=found.run, runs=RUNS))
        await execute(url, "analyze")
        server = HttpServer(app.app, host="127.0.0.1", port=0, limits=ConnectionLimits())
        await server.listen()
        serving = asyncio.ensure_future(server.serve())
        print(json.dumps({"port": server.port, "api_key": person}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        server.stop()
        await serving


async def ask_again(port: int, request: bytes, until: float, times: list[float]) -> None:
    """Ask over one connection until a time, and note how long each answer took. Raises SystemExit for
    an answer that is not 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < until:
        began = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the server answered {head.decode()[:300]}")
        lowered = head.lower()
        length = int(lowered.split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        times.append(time.perf_counter() - began)
    writer.close()


async def measure(port: int, api_key: str, process: psutil.Process, seconds: float) -> bool:
    """Ask each path. Returns whether the goals are met."""
    is_kept = True
    print(f"{'path':<12} {'p50 ms':>8} {'p95 ms':>8} {'/s':>8} {'CPU ms':>8}", flush=True)
    for name, path in PATHS.items():
        headers = {
            "Host": "127.0.0.1",
            "Authorization": f"Bearer {api_key}",
            "X-Osmosis-Git": REPOSITORY,
            "X-Osmosis-CLI-Version": "0.3.8",
        }
        lines = [f"GET {path} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items())]
        request = "\r\n".join([*lines, "", ""]).encode()
        for lasts_s in (1.0, seconds):  # the first time is to warm up
            times: list[float] = []
            before, until = process.cpu_times(), time.perf_counter() + lasts_s
            clients = 1 if name == LIST else CLIENTS
            asking = (ask_again(port, request, until, times) for _ in range(clients))
            await asyncio.gather(*asking)
            after = process.cpu_times()
        cpu_s = (after.user + after.system - before.user - before.system) / len(times)
        p95 = statistics.quantiles(times, n=20)[18]
        most_s = MOST_LIST_S if name == LIST else MOST_P95_S
        kept = p95 <= most_s and cpu_s <= MOST_CPU_S
        is_kept = is_kept and kept
        row = f"{name:<12} {statistics.median(times) * 1e3:>8.1f} {p95 * 1e3:>8.1f}"
        row += f" {len(times) / seconds:>8.0f} {cpu_s * 1e3:>8.2f}"
        print(row + ("" if kept else "  MISSED"), flush=True)
    return is_kept


async def run(url: str, home: Path, seconds: float) -> bool:
    """Start the server and measure."""
    command = [sys.executable, "-m", "bench.dialect_reads", "--serve", url, "--home", str(home)]
    server = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert server.stdin is not None
    assert server.stdout is not None
    said = json.loads(await server.stdout.readline())
    met = await measure(said["port"], said["api_key"], psutil.Process(server.pid), seconds)
    server.stdin.close()
    await server.wait()
    return met


def main() -> int:
    """Measure, or serve for a process that measures. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each path")
    parser.add_argument("--serve", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve, options.home))
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="headrace-bench-") as root,
        postgres_server() as server,
        fresh_database(server.url) as url,
    ):
        return 0 if asyncio.run(run(url, Path(root) / "home", options.seconds)) else 1


if __name__ == "__main__":
    sys.exit(main())
