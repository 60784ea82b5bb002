"""Starting a supervisor (`headrace up`) in the background, and waiting until it is ready."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from infra.local.death_signal import die_with
from infra.local.home import ChildState, prepare, read_state
from infra.local.supervisor import tail
from producers.cli.client import Client
from producers.cli.errors import Failure

READY_S = 300.0
WORKERS_S = 180.0
"""A worker's first start imports torch, on some machines from a cold disk."""
POLL_S = 0.1
LEASELESS = ("vllm",)
"""Supervised processes that perform no effects, so that they hold no lease."""


def launch(home: Path, environ: Mapping[str, str], *, tied: bool) -> subprocess.Popen[bytes]:
    """A supervisor of `home` that is ready. `tied`: it stops when this process ends, however that
    happens; otherwise it goes on. Raises Failure with what it said when it does not start."""
    prepare(home)
    log = home / "logs" / "supervisor.log"
    log.write_bytes(b"")  # its former words; what follows is appended, so that it can be shortened
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "producers.cli.main", "up", "--json"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with(os.getpid(), by=signal.SIGTERM) if tied else None,
        )
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        state = read_state(home)
        if state is not None and state.pid == process.pid and state.ready:
            return process
        if process.poll() is not None:
            raise _startup_failure(tail(log))
        time.sleep(0.05)
    process.terminate()
    raise Failure("FAILED", f"the server did not become ready; look into {home / 'logs'}")


def await_workers(home: Path, *, within_s: float = WORKERS_S) -> None:
    """Return once every process of the home's supervisor that performs work holds a live lease. Raises
    Failure that names those that do not after `within_s` seconds, or that the supervisor has ended."""
    deadline = time.monotonic() + within_s
    missing: list[ChildState] = []
    with Client() as client:
        while time.monotonic() < deadline:
            state = read_state(home)
            if state is None:
                raise _startup_failure(tail(home / "logs" / "supervisor.log"))
            leased = _leased_workers(client)
            expected = [child for child in state.children if child.name not in LEASELESS]
            missing = [child for child in expected if child.worker not in leased]
            if expected and not missing:
                return
            time.sleep(POLL_S)
    names = ", ".join(child.name for child in missing) or "every process"
    logs = ", ".join(child.log for child in missing) or str(home / "logs")
    raise Failure(
        "FAILED",
        f"the server answers, but after {within_s:.0f} s these processes are not registered: {names}. "
        f"Look into {logs}; the supervisor keeps trying, and `headrace down` stops it",
    )


def _leased_workers(client: Client) -> set[str]:
    """The ids of workers with a live lease; none while the server does not answer."""
    try:
        return {str(worker.get("id")) for worker in client.get("/status").get("workers") or ()}
    except Failure:
        return set()


def _startup_failure(said: str) -> Failure:
    """The failure that a supervisor printed as JSON, as our own."""
    last = said.splitlines()[-1] if said else ""
    if not last.startswith('{"schema_version"'):
        return Failure("FAILED", said or "the supervisor ended without a word")
    error = json.loads(last)["error"]
    return Failure(str(error["code"]), str(error["message"]))
