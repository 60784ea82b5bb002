"""`python -m consumers.process.fork_server`: imports what a device worker needs, and then forks
workers.

The supervisor talks to it over its standard input (`infra/operations/local/forkserver.py` has the
protocol). Nothing here may start a thread or touch a GPU: neither survives a fork.
"""

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from consumers.process.command import main
from consumers.registry import REGISTRY
from infra.operations.local import gc_freeze
from infra.sandbox.service.self_protection import hide_memory

IMPORTED = ("consumers.process.worker", "trainer.engine", "trainer.sampler.vllm.fleet")
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15


def serve() -> int:
    """Fork workers until the supervisor closes the channel. In a forked worker, do the worker's work.
    Returns an exit code."""
    hide_memory()  # forks are hidden too
    with gc_freeze.collect_nothing():
        for module in (*IMPORTED, *REGISTRY.values()):
            importlib.import_module(module)
    supervisor = os.getppid()
    order = _serve_forks()
    return 0 if order is None else _work(order, supervisor)


def _serve_forks() -> Mapping[str, Any] | None:
    """Fork a worker for each order of the supervisor. Returns the order in the worker, with the channel
    closed, and None in the server once the supervisor has closed the channel."""
    with socket.socket(fileno=os.dup(0)) as channel, channel.makefile("rb") as lines:
        channel.sendall(b"\n")
        for line in lines:
            try:
                pid = _fork_orphan()
            except OSError as error:
                sys.stderr.write(f"cannot fork: {error}\n")
                channel.sendall(b"null\n")
                continue
            if pid is None:
                order: Mapping[str, Any] = json.loads(line)
                return order
            channel.sendall(f"{pid}\n".encode())
    return None


def _fork_orphan() -> int | None:
    """Fork a process that the kernel gives to the nearest subreaper. Returns its pid, and None in the
    new process."""
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.close(writing)
            return None
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(middle, 0)
    answer = os.read(reading, 32)
    os.close(reading)
    if not answer:
        raise OSError("the process between ended early")
    return int(answer)


def _work(order: Mapping[str, Any], supervisor: int) -> int:
    """Become the worker, as if this process had been started with these arguments and this
    environment."""
    _await_adoption(supervisor)
    os.setsid()
    os.environ.clear()
    os.environ.update(order["env_vars"])
    with Path(os.devnull).open("rb") as nothing, Path(order["log"]).open("ab") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    names = [name for name in order["arguments"] if not name.startswith("-")]
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"headrace {'+'.join(names)}"[:15].encode())
    return main(order["arguments"])


def _await_adoption(supervisor: int) -> None:
    """Wait until the supervisor is our parent, and make sure that we die with it."""
    between = os.getppid()
    while between not in (supervisor, 1) and os.getppid() == between:
        os.sched_yield()  # the process in between ends at once
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(serve())
