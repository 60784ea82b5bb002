"""The one thread on which all torch work of a process runs.

Sampler and learner take turns on it, job by job, in the order of their requests. So they never compete
for cores or GPU memory. Results do not depend on timing, because two settings are made before the first
operation: the number of torch's threads is fixed, and only deterministic kernels are allowed.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from schemas.costs.work import CPU, gpu_kind

P = ParamSpec("P")
T = TypeVar("T")


class Device:
    """A torch device and the thread that owns it. `threads` is how many threads torch uses (None:
    torch's default). `gpu_share` limits the share of the GPU's memory that this process uses. Beyond it
    this process gets an out-of-memory error, and other processes do not fail. `time_share` returns the
    share of time that the thread may work now. After each job it rests for the remaining time, and
    `busy_s` counts the seconds that it worked."""

    def __init__(
        self,
        *,
        threads: int | None = None,
        gpu_share: float | None = None,
        time_share: Callable[[], float] | None = None,
    ) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.torch = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if gpu_share is not None and self.torch.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(gpu_share)
        self.threads = threads or torch.get_num_threads()
        self.busy_s = 0.0
        self._time_share = time_share
        self._rests_until = 0.0
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="device", initializer=self._prepare
        )

    def _prepare(self) -> None:
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(mode=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in its stubs

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on the device thread and return its result. A cancelled caller stops waiting at
        once. Work that has already started still runs to its end, and its result is dropped."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._executor, lambda: self._in_turn(lambda: work(*args, **kwargs))
        )

    def _in_turn(self, work: Callable[[], T]) -> T:
        """Run `work` once the thread has rested for the job before."""
        if self._time_share is None:
            return work()
        time.sleep(max(0.0, self._rests_until - time.monotonic()))
        began = time.monotonic()
        try:
            return work()
        finally:
            ended = time.monotonic()
            self.busy_s += ended - began
            share = self._time_share()
            self._rests_until = ended + (ended - began) * (1 / share - 1)

    @property
    def versions(self) -> dict[str, str]:
        """The things that the bits of a result depend on besides seed and data: torch's version, the
        name of the device, and the number of threads."""
        kind = torch.cuda.get_device_name() if self.torch.type == "cuda" else "cpu"
        cpu = torch.backends.cpu.get_cpu_capability()
        return {
            "torch": torch.__version__,
            "device": kind if self.torch.type == "cuda" else f"cpu {cpu}",
            "threads": str(self.threads),
        }

    @property
    def kind(self) -> str:
        """The kind of device, as the cost ledger names it: `cpu`, or `gpu.` and a name."""
        return gpu_kind(torch.cuda.get_device_name()) if self.torch.type == "cuda" else CPU

    def close(self) -> None:
        """Wait for the job that runs, and drop the jobs that wait."""
        self._executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def limit_threads(most: int) -> Iterator[None]:
    """Use at most this many torch threads for the operations inside the block, on the calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, most))
    try:
        yield
    finally:
        torch.set_num_threads(before)
