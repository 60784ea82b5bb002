"""Load by strangers on a real control process with a real Postgres: half-open connections, large bodies
without a token, and requests with bad tokens as fast as one client can send them. Each load runs by
itself, and then all of them together.

Prints what a valid client and `/readyz` see meanwhile, how much memory the process needs more, and how
many lines it logs. The client shares the machine. Ends with 1 when a limit is missed.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path

from infra.local import embedded_postgres
from tests.kit.postgres import fresh_database
from tests.kit.strangers import (
    MIB,
    ControlProcess,
    control_process,
    half_open,
    observing,
    raise_file_limit,
    send_bad_tokens,
    send_bodies,
)

MOST_MEMORY = 50 * MIB
MOST_LINES = 50
CONNECTIONS, BODIES, BODY = 1000, 100, 8 * MIB
AT_ONCE = 16

Load = Callable[[ControlProcess, float], Coroutine[None, None, Counter[int]]]


async def _nothing(_: ControlProcess, seconds: float) -> Counter[int]:
    await asyncio.sleep(seconds)
    return Counter()


async def _connections(control: ControlProcess, seconds: float) -> Counter[int]:
    async with half_open(control, CONNECTIONS):
        await asyncio.sleep(seconds)
    return Counter()


async def _bodies(control: ControlProcess, seconds: float) -> Counter[int]:
    found: Counter[int] = Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found += await send_bodies(control, BODIES, BODY)
    return found


async def _invented_tokens(control: ControlProcess, seconds: float) -> Counter[int]:
    return await send_bad_tokens(control, seconds=seconds, at_once=AT_ONCE, well_formed=False)


async def _well_formed_tokens(control: ControlProcess, seconds: float) -> Counter[int]:
    return await send_bad_tokens(control, seconds=seconds, at_once=AT_ONCE, well_formed=True)


async def _all_of_them(control: ControlProcess, seconds: float) -> Counter[int]:
    loads = (_connections, _bodies, _invented_tokens, _well_formed_tokens)
    return sum(await asyncio.gather(*(load(control, seconds) for load in loads)), Counter())


LOADS: dict[str, Load] = {
    "no strangers": _nothing,
    "1,000 half-open connections": _connections,
    "100 bodies of 8 MiB at once": _bodies,
    "invented tokens": _invented_tokens,
    "well-formed unknown tokens": _well_formed_tokens,
    "all together": _all_of_them,
}


async def measure(control: ControlProcess, name: str, seconds: float) -> bool:
    """Run one load, and print what was observed. Returns whether the limits were kept."""
    before, lines = control.memory, control.num_log_lines
    began = time.monotonic()
    async with observing(control) as seen:
        answers = await LOADS[name](control, seconds)
    took = time.monotonic() - began
    more, said = seen.most_memory - before, control.num_log_lines - lines
    is_kept = more <= MOST_MEMORY and said <= MOST_LINES and set(seen.statuses) == {200}
    print(
        f"{name:<28} {sum(answers.values()) / took:>6.0f}/s {dict(answers)!s:<28}"
        f" client p99 {seen.p99(seen.client_s) * 1e3:>6.0f} ms"
        f"  readyz p99 {seen.p99(seen.ready_s) * 1e3:>6.0f} ms"
        f"  statuses {dict(seen.statuses)}"
        f"  memory +{more / MIB:.1f} MiB  log +{said} lines  {'ok' if is_kept else 'MISSED'}",
        flush=True,
    )
    return is_kept


async def measure_all(control: ControlProcess, seconds: float) -> bool:
    """Run every load, one after the other."""
    return all([await measure(control, name, seconds) for name in LOADS])


def main() -> int:
    """Run the loads for the seconds that are given. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each load")
    given = parser.parse_args()
    raise_file_limit()
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as directory:
        server = embedded_postgres.start(Path(home))
        try:
            with (
                fresh_database(server.url) as url,
                control_process(url, Path(directory)) as control,
            ):
                is_kept = asyncio.run(measure_all(control, given.seconds))
                print(f"afterwards: memory {control.memory / MIB:.1f} MiB")
        finally:
            server.stop()
            embedded_postgres.remove(Path(home))
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
