"""A composition root: builds the adapters and engines of a worker process for the consumers it hosts.

`ports.py` opens the ports of its consumers. The engine (torch) is built only for a process that takes
the lanes of a device.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from uuid import uuid4

from consumers.process.ports import open_ports, ports_from
from infra import failpoints, telemetry
from infra.adapters import Backend, open_backend
from infra.operations.local import gc_freeze
from infra.settings.quotas import SAMPLES
from infra.settings.settings import Settings
from infra.spine.postgres.lease import LEASE_LOST, LeaseKeeper, leave
from infra.spine.postgres.notify import News
from infra.spine.runtime.consumer import AnyConsumer
from infra.spine.runtime.hosting import Hosting, capacity_of, spare_of
from infra.spine.runtime.runtime import Runtime
from schemas.effects import Lane
from schemas.errors import InvalidConfig
from schemas.ids import WorkerId

logger = logging.getLogger(__name__)

MOST_FILES = 16384

SWITCH_S = 0.001
"""How long a thread of this process may keep the interpreter while others wait for it. The loop is busy
all the time while many samples are generated. With Python's own 5 ms, a file that another thread reads
or writes waits 5 ms for each system call."""


def worker_id() -> WorkerId:
    """Return the name under which this process holds claims: the supervisor's choice, or a new one."""
    supervisor_name = os.environ.get("HEADRACE_WORKER_ID")
    return WorkerId(supervisor_name or f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}")


def raise_file_limit() -> None:
    """Let this process open as many files as it may, at most MOST_FILES, because each request of a
    workflow has a connection. Many systems allow 1,024 unless a process asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def work(consumers: Sequence[AnyConsumer], *, lanes: Sequence[Lane], drain: bool) -> int:
    """Host `consumers` until stopped, or with `drain` until nothing is left. Returns an exit code."""
    settings = Settings.load(os.environ)
    raise_file_limit()
    sys.setswitchinterval(SWITCH_S)
    telemetry.setup(settings, service="+".join(consumer.name for consumer in consumers))
    failpoints.arm(settings.failpoint or "", settings.home)
    hosting = Hosting(worker=worker_id(), consumers=tuple(consumers), lanes=tuple(lanes))
    async with (
        open_backend(settings) as backend,
        open_runtime(hosting, backend, settings) as runtime,
    ):
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, runtime.stop)
        async with hold_lease(hosting, backend, runtime) as keeper:
            logger.info("worker %s hosts %s", hosting.worker, [c.name for c in consumers])
            await runtime.run(drain=drain)
            await asyncio.to_thread(telemetry.close)
            return LEASE_LOST if keeper.lost else 0


async def relay(consumers: Sequence[str]) -> int:
    """Publish the log to Kafka for these consumers, until stopped. Raises InvalidConfig when
    HEADRACE_KAFKA is not set."""
    settings = Settings.load(os.environ)
    telemetry.setup(settings, service="relay")
    failpoints.arm(settings.failpoint or "", settings.home)
    if settings.kafka is None:
        raise InvalidConfig(
            "the relay publishes to Kafka, and HEADRACE_KAFKA is not set; name the servers there"
        )
    async with open_backend(settings) as backend:
        task = asyncio.ensure_future(backend.relay(settings.kafka, consumers).run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return 0


@asynccontextmanager
async def hold_lease(
    hosting: Hosting, backend: Backend, runtime: Runtime
) -> AsyncIterator[LeaseKeeper]:
    """Hold this worker's lease inside the block. Each heartbeat also applies the gates of runs. When the
    lease is lost, the runtime stops."""
    loop = asyncio.get_running_loop()

    def beat() -> None:
        asyncio.run_coroutine_threadsafe(_apply_gates(runtime), loop)

    def stop_working() -> None:
        loop.call_soon_threadsafe(runtime.stop)

    keeper = LeaseKeeper(
        backend.database.url,
        hosting.worker,
        lanes=hosting.lanes,
        on_beat=beat,
        on_lost=stop_working,
        on_overdue=leave,
    )
    await keeper.start()
    try:
        yield keeper
    finally:
        await keeper.stop()


async def _apply_gates(runtime: Runtime) -> None:
    """Apply the gates. Nobody awaits this call, so an error is logged here, and the next heartbeat tries
    again."""
    try:
        await runtime.apply_gates()
    except Exception:  # as said above
        logger.exception("the gates could not be applied")


@asynccontextmanager
async def open_runtime(
    hosting: Hosting,
    backend: Backend,
    settings: Settings,
    *,
    given: Mapping[str, object] | None = None,
) -> AsyncIterator[Runtime]:
    """Open a runtime with the ports that its consumers need, and close them after the block. `given` are
    those that the caller has opened, by name."""
    async with AsyncExitStack() as stack:
        ports = await open_ports(stack, hosting, backend, settings, given or {})
        hosting = replace(
            hosting,
            capacity=capacity_of(settings.capacity, generate=ports.num_samples),
            spare=spare_of(settings.capacity, generate=ports.num_samples),
            run_capacity={Lane(lane): most for lane, most in settings.run_capacity.items()},
            workspace_samples=settings.quotas.get(SAMPLES),
            devices=dict.fromkeys((Lane.GENERATE, Lane.TRAIN, Lane.SERVE), ports.device),
        )
        gc_freeze.freeze()
        runtime = Runtime(
            hosting,
            log=backend.log,
            effects=backend.effects,
            bus=backend.bus(),
            ports=ports_from(ports.by_name),
            artifacts=backend.artifacts,
            clock=backend.clock,
            wakeup=backend.notifier.subscribe(News.WORK),
        )
        yield runtime
