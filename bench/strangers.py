"""Load by strangers on a real control process with a real Postgres: half-open connections, large
bodies without an API key, and requests with bad keys. Each load runs by itself, and then all of
them together.

10,000 requests with bad keys are offered per second, each over a new connection, whether or not the
server keeps up. They come from 16 other addresses of this machine, and then from the address of the
valid client too. The program that offers them, `offered_load.go`, is built with Go. Without Go the
bench says so, and a client in Python sends as many as it can.

Prints what became of the requests, what a valid client and `/readyz` see meanwhile, how much memory
the process needs more, and how many lines it logs. The clients share the machine. Ends with 1 when
a limit is missed.
"""

import argparse
import asyncio
import atexit
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path

from infra.operations.local import embedded_postgres
from tests.kit.postgres import fresh_database
from tests.kit.strangers import (
    MIB,
    ControlProcess,
    control_process,
    half_open,
    observing,
    raise_file_limit,
    send_bad_keys,
    send_bodies,
)

MOST_MEMORY = 50 * MIB
MOST_LINES = 50
CONNECTIONS, BODIES, BODY = 1000, 100, 8 * MIB
AT_ONCE = 16
OFFERED_PER_S = 10_000
ADDRESSES = 16
BUILD_S = 300
NO_GO = (
    "the program `go` is not on PATH, so 10,000 requests per second are NOT offered: install Go. A "
    "client in Python sends as many as it can instead"
)

Load = Callable[[ControlProcess, float], Coroutine[None, None, Counter[int | str]]]


async def _nothing(_: ControlProcess, seconds: float) -> Counter[int | str]:
    await asyncio.sleep(seconds)
    return Counter()


async def _connections(control: ControlProcess, seconds: float) -> Counter[int | str]:
    async with half_open(control, CONNECTIONS):
        await asyncio.sleep(seconds)
    return Counter()


async def _bodies(control: ControlProcess, seconds: float) -> Counter[int | str]:
    found: Counter[int | str] = Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found += Counter(dict(await send_bodies(control, BODIES, BODY)))
    return found


async def _invented_api_keys(control: ControlProcess, seconds: float) -> Counter[int | str]:
    sent = await send_bad_keys(control, seconds=seconds, at_once=AT_ONCE, well_formed=False)
    return Counter(dict(sent))


async def _well_formed_api_keys(control: ControlProcess, seconds: float) -> Counter[int | str]:
    sent = await send_bad_keys(control, seconds=seconds, at_once=AT_ONCE, well_formed=True)
    return Counter(dict(sent))


def _offered(addresses: int) -> Load:
    async def offer(control: ControlProcess, seconds: float) -> Counter[int | str]:
        program = _load_program()
        if program is None:
            return await _invented_api_keys(control, seconds)
        numbers = (control.port, OFFERED_PER_S, seconds, addresses)
        offering = await asyncio.create_subprocess_exec(
            str(program), *map(str, numbers), stdout=asyncio.subprocess.PIPE
        )
        said, _ = await offering.communicate()
        told = json.loads(said)
        return Counter({name: num for name, num in told.items() if name != "seconds" and num})

    return offer


@cache
def _load_program() -> Path | None:
    """The program that offers load, built now; None without Go."""
    go = shutil.which("go")
    if go is None:
        print(NO_GO, file=sys.stderr, flush=True)
        return None
    program = Path(tempfile.mkdtemp(prefix="headrace-load-")) / "offered_load"
    source = Path(__file__).with_name("offered_load.go")
    subprocess.run([go, "build", "-o", str(program), str(source)], check=True, timeout=BUILD_S)
    atexit.register(shutil.rmtree, program.parent, ignore_errors=True)
    return program


async def _all_of_them(control: ControlProcess, seconds: float) -> Counter[int | str]:
    loads = (_connections, _bodies, _offered(ADDRESSES), _well_formed_api_keys)
    return sum(await asyncio.gather(*(load(control, seconds) for load in loads)), Counter())


LOADS: dict[str, Load] = {
    "no strangers": _nothing,
    "1,000 half-open connections": _connections,
    "100 bodies of 8 MiB at once": _bodies,
    "10,000/s, other addresses": _offered(ADDRESSES),
    "10,000/s, the same address": _offered(0),
    "well-formed unknown API keys": _well_formed_api_keys,
    "all together": _all_of_them,
}


async def measure(control: ControlProcess, name: str, seconds: float) -> bool:
    """Run one load, and print what was observed. Returns whether the limits were kept."""
    before, lines, cpu_s = control.memory, control.num_log_lines, control.cpu_s
    began = time.monotonic()
    async with observing(control) as seen:
        answers = await LOADS[name](control, seconds)
    took = time.monotonic() - began
    more, said = seen.most_memory - before, control.num_log_lines - lines
    is_kept = more <= MOST_MEMORY and said <= MOST_LINES and set(seen.statuses) == {200}
    print(
        f"{name:<28} {took:>5.1f} s, {control.cpu_s - cpu_s:.1f} CPU s {dict(answers)!s:<28}"
        f" client p99 {seen.p99(seen.client_s) * 1e3:>6.0f} ms"
        f"  readyz p99 {seen.p99(seen.ready_s) * 1e3:>6.0f} ms"
        f"  statuses {dict(seen.statuses)}"
        f"  memory +{more / MIB:.1f} MiB  log +{said} lines  {'ok' if is_kept else 'MISSED'}",
        flush=True,
    )
    return is_kept


async def measure_all(control: ControlProcess, seconds: float, part: str) -> bool:
    """Run every load with this part in its name, one after the other."""
    return all([await measure(control, name, seconds) for name in LOADS if part in name])


def main() -> int:
    """Run the loads for the seconds that are given. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each load")
    parser.add_argument("--load", help="only the loads with this text in their names")
    given = parser.parse_args()
    raise_file_limit()
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as directory:
        server = embedded_postgres.start(Path(home))
        try:
            with (
                fresh_database(server.url) as url,
                control_process(url, Path(directory)) as control,
            ):
                is_kept = asyncio.run(measure_all(control, given.seconds, given.load or ""))
                print(f"afterwards: memory {control.memory / MIB:.1f} MiB")
        finally:
            server.stop()
            embedded_postgres.remove(Path(home))
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
