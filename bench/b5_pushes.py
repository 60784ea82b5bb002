"""B5, ingestion: 10,000 signed pushes to 100 workspaces over 64 connections, to a real `headrace up`.

Each push is a JSON payload of about 7 KB with its own delivery id, signed under the secret of its
workspace. It is answered with 202 once its event is durable, so the time until the last answer is the
time until all are durable. The repositories are real and local: sync lists their refs meanwhile. CPU is
that of the control process, of Postgres, and of the client, which shares the machine.

With `--training`, a run trains meanwhile, and pushes arrive at a steady rate. It prints by how much a
step takes longer than before the pushes: windows with and without pushes alternate (A B B A).
"""

import argparse
import asyncio
import hashlib
import hmac
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import psutil

from tests.kit.platform import Platform, eventually, make_workspace, platform, run_config

BEFORE, AFTER = "a" * 40, "b" * 40
MOST_S, MOST_P99_S = 5.0, 1.0
FILLER = [{"id": f"{n:040x}", "message": "x" * 300, "added": ["a.py"] * 8} for n in range(14)]


@dataclass(frozen=True)
class Target:
    """A connected workspace: the path of its webhook, and its secret."""

    path: str
    secret: bytes


def connect_workspaces(started: Platform, root: Path, count: int) -> list[Target]:
    """Connect this many local repositories. Returns their webhooks."""
    first = root / "r0.git"
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(first)], check=True)
    targets = []
    for number in range(count):
        url = root / f"r{number}.git"
        if number:
            subprocess.run(["cp", "-r", str(first), str(url)], check=True)
        environment = {**os.environ, "GIT_DIR": str(url), "GIT_COMMITTER_NAME": "b"}
        environment |= {"GIT_AUTHOR_NAME": "b", "EMAIL": "b@example.org"}
        tree = subprocess.run(
            ["git", "mktree"], input=b"", env=environment, check=True, capture_output=True
        )
        commit = ["git", "commit-tree", "-m", str(number), tree.stdout.decode().strip()]
        made = subprocess.run(commit, env=environment, check=True, capture_output=True)
        head = made.stdout.decode().strip()
        subprocess.run(["git", "update-ref", "refs/heads/main", head], env=environment, check=True)
        body = {"url": str(url), "name": f"w{number}", "forge": "none"}
        answer = started.post("/workspaces/connect", body).json()
        if "hook" not in answer:
            raise SystemExit(f"a workspace is not connected: {answer}")
        secret = answer["hook"]["secret"].encode()
        targets.append(Target(f"/webhooks/w{number}", secret))
    return targets


def request_bytes(target: Target, number: int) -> bytes:
    """One signed request."""
    payload = {
        "ref": f"refs/heads/b{number % 7}",
        "before": BEFORE,
        "after": AFTER,
        "forced": False,
        "pusher": {"name": "ada"},
        "commits": FILLER,
    }
    body = json.dumps(payload).encode()
    signature = hmac.new(target.secret, body, hashlib.sha256).hexdigest()
    head = (
        f"POST {target.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"X-GitHub-Event: push\r\nX-GitHub-Delivery: {uuid4()}\r\n"
        f"X-Hub-Signature-256: sha256={signature}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _send(url: str, requests: list[bytes], times: list[float]) -> None:
    """Send requests over one connection, one after the other, until none is left."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    while requests:
        request = requests.pop()
        began = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.partition(b":")[2])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        body = await reader.readexactly(length)
        times.append(time.perf_counter() - began)
        if b" 202 " not in head.split(b"\r\n", 1)[0]:
            raise SystemExit(f"a push was answered {head.split(b'.', 1)[0]!r}: {body[:300]!r}")
    writer.close()


async def _send_steadily(url: str, requests: list[bytes], *, rate: float, at_once: int) -> None:
    """Send requests at `rate` a second over `at_once` connections."""

    async def one(connection: int) -> None:
        times: list[float] = []
        mine = requests[connection::at_once]
        began = time.perf_counter()
        for number, request in enumerate(mine):
            due = began + (number * at_once + connection) / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await _send(url, [request], times)

    await asyncio.gather(*(one(connection) for connection in range(at_once)))


def begin_training(started: Platform, root: Path) -> str:
    """Submit a run that trains until it is stopped. Returns its id once it takes steps."""
    tree = make_workspace(root / "trained")
    answer = started.post("/workspaces", {"url": str(tree), "name": "trained"})
    if answer.status_code != 201:
        raise SystemExit(answer.text)
    started.upload("numbers")
    run = started.submit(run_config(advanced={"max_steps": 1_000_000}), workspace="trained")
    eventually(
        lambda: steps_of(started, run) >= 20 or None, within_s=60, what="the run takes steps"
    )
    return run


def steps_of(started: Platform, run: str) -> int:
    return int(started.info(run)["run"]["current_step"] or 0)


def step_time_s(started: Platform, run: str, during: Callable[[], None]) -> float:
    """Seconds a step took while `during` ran."""
    first, began = steps_of(started, run), time.perf_counter()
    during()
    return (time.perf_counter() - began) / max(1, steps_of(started, run) - first)


def measure_training(
    started: Platform, root: Path, targets: list[Target], *, rate: float, window_s: float
) -> None:
    run = begin_training(started, root)
    count = int(rate * window_s)
    calm: list[float] = []
    pushed: list[float] = []

    def rest() -> None:
        time.sleep(window_s)  # the window that is measured

    def push() -> None:
        requests = [request_bytes(targets[n % len(targets)], n) for n in range(count)]
        asyncio.run(_send_steadily(started.url, requests, rate=rate, at_once=16))

    for windows, during in ((calm, rest), (pushed, push), (pushed, push), (calm, rest)):
        windows.append(step_time_s(started, run, during))
    before, after = statistics.mean(calm), statistics.mean(pushed)
    print(f"while a run trains, {rate:g} pushes a second:")
    print(f"a step        {before * 1e3:.1f} ms without, {after * 1e3:.1f} ms with pushes", end="")
    print(f" ({after / before - 1:+.1%}, target +15%)")
    started.post(f"/runs/{run}/stop", {})


def server_cpu_s(started: Platform) -> dict[str, float]:
    """CPU seconds so far of the platform's processes, by what they are."""
    used: dict[str, float] = {}
    for process in psutil.Process(started.process.pid).children(recursive=True):
        try:
            line, spent = " ".join(process.cmdline()), process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        kind = (
            "control"
            if "producers.serve" in line
            else "postgres"
            if "postgres" in line
            else "other"
        )
        total = spent.user + spent.system + spent.children_user + spent.children_system
        used[kind] = used.get(kind, 0.0) + total
    return used


def own_cpu_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime


async def measure(started: Platform, targets: list[Target], *, pushes: int, at_once: int) -> None:
    requests = [request_bytes(targets[n % len(targets)], n) for n in range(pushes)]
    size = len(requests[0])
    before, own, times = server_cpu_s(started), own_cpu_s(), list[float]()
    began = time.perf_counter()
    await asyncio.gather(*(_send(started.url, requests, times) for _ in range(at_once)))
    lasted = time.perf_counter() - began
    after = server_cpu_s(started)
    spent = {kind: round(after[kind] - before.get(kind, 0.0), 2) for kind in after}
    times.sort()
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    recorded = sum(
        started.get(f"/workspaces/w{n}/deliveries", limit=1)["total_count"]
        for n in range(len(targets))
    )
    print(f"{pushes} pushes of {size} bytes, {len(targets)} workspaces, {at_once} connections")
    print(f"all durable   {lasted:.2f} s ({pushes / lasted:.0f} a second), target {MOST_S:g} s")
    print(
        f"an answer     p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, most {times[-1] * 1e3:.0f} ms"
    )
    print(f"CPU seconds   client {own_cpu_s() - own:.2f}, {spent}")
    print(f"recorded      {recorded} of {pushes}")
    if recorded != pushes:
        raise SystemExit("a push was lost or doubled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pushes", type=int, default=10_000)
    parser.add_argument("--workspaces", type=int, default=100)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--rate", type=float, default=50.0, help="pushes a second with --training")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-b5-") as folder:
        root = Path(folder)
        with platform(root / "home") as started:
            targets = connect_workspaces(started, root, options.workspaces)
            print(f"{len(targets)} workspaces are connected", flush=True)
            if options.training:
                measure_training(started, root, targets, rate=options.rate, window_s=15.0)
                return
            asyncio.run(
                measure(started, targets, pushes=options.pushes, at_once=options.connections)
            )


if __name__ == "__main__":
    sys.exit(main())
