"""Bus latency: from the append of an event to the `handle` of a consumer in another process.

Embedded bus and Kafka, idle (one event at a time) and under load. `append` is the time of the
transaction that makes the event durable (the disk's time). `handle` is the time from then until the
decider is called: p50, p99 and the worst. `whole` is the p50 of both together. The consumer is a whole
runtime (inbox, commit, acknowledge). With Kafka the relay is a process of its own, as on a cluster.
Kafka is the one that HEADRACE_TEST_KAFKA names. Otherwise one is started (JDK 17 and Maven).
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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from consumers.process.worker import open_runtime
from infra.adapters import open_backend
from infra.operations.local import embedded_postgres
from infra.settings.settings import Settings
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.migrate import migrate
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.hosting import Hosting
from schemas.events import Event, RunWarned
from schemas.ids import ConsumerName, StreamName, WorkerId, checkpoint_stream
from tests.kit.commits import commit_of_streams
from tests.stack.kafka import kafka_server

ROOT = Path(__file__).resolve().parents[1]
WARM_S = 10.0
"""Of many small appends, before anything counts: a broker that has just started runs uncompiled code,
and takes nearly twice as long for a record; it compiles after some thousand requests."""

SETTLE_S = 5.0
"""After it even the reconciler has brought what there is."""


@dataclass(frozen=True, slots=True)
class Load:
    """`appends` transactions of `batch` events each, `per_s` of them a second."""

    name: str
    appends: int
    batch: int
    per_s: float


HANDLED: dict[str, float] = {}
"""Event -> when its decider was first called."""


def handle(state: None, message: RunWarned, meta: Meta) -> Decision:
    HANDLED.setdefault(message.run, time.monotonic())
    return NOTHING


def evolve(state: None, event: Event) -> None:
    return None


def routes(message: RunWarned) -> tuple[StreamName, ...]:
    return (checkpoint_stream("bench"),)


CONSUMER = Consumer(
    name=ConsumerName("bench"),
    category="checkpoint",
    reads=(RunWarned,),
    emits=(),
    effects=(),
    initial=None,
    evolve=evolve,
    handle=handle,
    routes=routes,
)


async def listen(out: Path) -> None:
    """Host the consumer until SIGTERM; then write what was measured."""
    settings = Settings.load(os.environ)
    hosting = Hosting(WorkerId("bench"), (CONSUMER,), ())
    async with (
        open_backend(settings) as backend,
        open_runtime(hosting, backend, settings) as runtime,
    ):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, runtime.stop)
        await runtime.run()
    await asyncio.to_thread(out.write_text, json.dumps(HANDLED))


@dataclass(frozen=True, slots=True)
class Appended:
    """An event's append: when it was asked for, and when it was durable."""

    run: str
    began: float
    durable: float


async def append(log: PostgresLog, load: Load) -> list[Appended]:
    """Append at a steady pace, each transaction started when it is due."""
    first = time.monotonic()
    under_way = []
    for number in range(load.appends):
        await asyncio.sleep(max(0.0, first + number / load.per_s - time.monotonic()))
        under_way.append(asyncio.ensure_future(_one(log, load.batch)))
    return [appended for task in under_way for appended in await task]


async def _one(log: PostgresLog, batch: int) -> list[Appended]:
    began = time.monotonic()
    events = [RunWarned(run=uuid4().hex, step=1, message="look") for _ in range(batch)]
    recorded = await log.commit(commit_of_streams(*events))
    return [Appended(r.run, began, time.monotonic()) for r in recorded]


@contextmanager
def process(environment: Mapping[str, str], *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Headrace that is stopped at the end."""
    child = subprocess.Popen([sys.executable, *arguments], env={**os.environ, **environment})
    try:
        yield child
    finally:
        child.terminate()
        child.wait(20)


async def measure(
    server: embedded_postgres.EmbeddedPostgres, home: Path, kafka: str | None, loads: list[Load]
) -> tuple[dict[str, list[Appended]], dict[str, float]]:
    """Run all loads over one bus; what was appended in each, and when each event was handled."""
    environment = {
        "HEADRACE_HOME": str(home),
        "HEADRACE_DATABASE_URL": server.url,
        "PYTHONPATH": str(ROOT),
    }
    if kafka is not None:
        environment |= {
            "HEADRACE_KAFKA": kafka,
            "HEADRACE_KAFKA_PREFIX": f"bench{uuid4().hex[:8]}.",
        }
    await migrate(server.url)
    out = home / "handled.json"
    settings = Settings.load({**os.environ, **environment, "HEADRACE_KAFKA": ""})
    with ExitStack() as stack:
        if kafka is not None:
            stack.enter_context(process(environment, "-m", "consumers", "relay"))
        stack.enter_context(process(environment, __file__, "--listen", str(out)))
        async with open_backend(settings) as backend:
            await append(backend.log, Load("warm", int(WARM_S * 300), 3, 300))
            appended = {load.name: await append(backend.log, load) for load in loads}
            await asyncio.sleep(SETTLE_S)
    return appended, json.loads(out.read_text())


def show(bus: str, load: Load, appended: list[Appended], handled: dict[str, float]) -> None:
    missing = [one.run for one in appended if one.run not in handled]
    assert not missing, f"{len(missing)} of {len(appended)} events were not handled"
    took = statistics.median(one.durable - one.began for one in appended)
    after = sorted(max(0.0, handled[one.run] - one.durable) for one in appended)
    whole = statistics.median(handled[one.run] - one.began for one in appended)
    p99 = after[min(len(after) - 1, int(len(after) * 0.99))]
    cells = (took, statistics.median(after), p99, after[-1], whole)
    print(f"{bus:10}{load.name:10}{len(after):8}" + "".join(f"{c * 1000:10.2f}" for c in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each load lasts")
    parser.add_argument("--only", choices=("embedded", "kafka"))
    parser.add_argument("--listen", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.listen:
        asyncio.run(listen(asked.listen))
        return
    loads = [
        Load("idle", int(asked.seconds * 10), 1, 10),
        Load("1000/s", int(asked.seconds * 100), 10, 100),
    ]
    print(f"Bus latency in ms, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    names = ("append", "handle p50", "p99", "worst", "whole p50")
    print(f"{'bus':10}{'load':10}{'events':>8}" + "".join(f"{name:>10}" for name in names))
    for bus in ("embedded", "kafka"):
        if asked.only not in (None, bus):
            continue
        with ExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            kafka = None
            if bus == "kafka":
                kafka = os.environ.get("HEADRACE_TEST_KAFKA") or (
                    stack.enter_context(kafka_server(home / "kafka")).bootstrap
                )
            server = embedded_postgres.start(home)
            stack.callback(server.stop)
            appended, handled = asyncio.run(measure(server, home, kafka, loads))
            for load in loads:
                show(bus, load, appended[load.name], handled)


if __name__ == "__main__":
    main()
