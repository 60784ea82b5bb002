"""The checks of `headrace doctor` that concern the machine: its GPU, its memory, and its access to the
model hub.

A machine without a GPU trains on its CPU. A machine that cannot reach the hub can train the models that
it already has.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from producers.cli.display.units import format_size

GPU_S = 10.0
HUB_S = 3.0
NEEDED_MEMORY = 1 << 30
"""Bytes of memory that are enough for a worker with torch and the smallest model, in addition to the
server and the database."""
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to check. `ok` is None when the answer is not known or not needed; `fix` says how to
    repair it."""

    name: str
    ok: bool | None
    detail: str
    fix: str | None = None


def check_gpu() -> Check:
    """The GPUs that the driver lists. A device whose driver does not answer is a fault."""
    name, device = "GPU", Path("/dev/nvidia0").exists()
    program = shutil.which("nvidia-smi")
    if program is None:
        none = (
            "a device exists, but nvidia-smi does not" if device else "none: models run on the CPU"
        )
        return Check(name, None, none)
    query = ("--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader")
    try:
        completed = subprocess.run(
            [program, *query], capture_output=True, text=True, timeout=GPU_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        completed = subprocess.CompletedProcess(program, 1, "", str(error))
    if completed.returncode:
        output = " ".join((completed.stdout + completed.stderr).split())[:200] or "nothing"
        fix = (
            "repair or reload the driver, then run nvidia-smi; without a GPU models run on the CPU"
        )
        return Check(name, False if device else None, f"nvidia-smi says: {output}", fix)
    gpus = []
    for line in completed.stdout.splitlines():
        model, total, free, driver = (part.strip() for part in line.split(","))
        gpus.append(f"{model}, {free} of {total} free, driver {driver}")
    return Check(name, ok=True, detail="; ".join(gpus))


def check_memory() -> Check:
    """The memory available to this process, according to the kernel and the limit of its container."""
    available, limit = _available_bytes(), _container_headroom_bytes()
    if available is None:
        return Check("memory", None, "unknown on this system")
    free = min(available, limit) if limit is not None else available
    fix = "stop other programs, or give the container more memory"
    cores = f"{len(os.sched_getaffinity(0))} cores"
    detail = f"{format_size(free)} available, {cores}"
    return Check("memory", free >= NEEDED_MEMORY, detail, fix)


def _available_bytes() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def _container_headroom_bytes() -> int | None:
    """The bytes that remain of the container's memory limit; None without a limit."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used) if limit.isdigit() else None


def check_hub() -> Check:
    """Whether the model hub answers. Without it, only models that are already here can be trained."""
    from producers.core.models.hub import endpoint, offline

    name = "model hub"
    if (variable := offline()) is not None:
        return Check(name, None, f"not checked: {variable} is set, so hub ids come from the cache")
    import httpx

    async def head_status() -> int:
        async with asyncio.timeout(HUB_S), httpx.AsyncClient(timeout=HUB_S) as client:
            return (await client.head(endpoint())).status_code

    try:
        status = asyncio.run(head_status())
    except (TimeoutError, OSError, httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or f"no answer within {HUB_S:g} s"
        only = "hub ids work only from the cache; set HF_ENDPOINT to use another hub"
        return Check(name, None, f"{endpoint()} cannot be reached ({why}): {only}")
    return Check(name, ok=True, detail=f"{endpoint()} answers ({status})")


MACHINE_CHECKS: tuple[Callable[[], Check], ...] = (check_gpu, check_memory, check_hub)
