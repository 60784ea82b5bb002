"""Starts a supervisor (`headrace up`) in the background and waits until it is ready."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.operations.local.death_signal import die_with
from infra.operations.local.home import ChildState, prepare, read_state, refuse_owned
from infra.operations.local.supervisor import tail
from producers.cli.client import Client
from producers.cli.errors import Failure

READY_S = 300.0
WORKERS_S = 180.0
"""How long workers may take to start. The first start imports torch, on some machines from a slow
disk."""
POLL_S = 0.1
LEASELESS = ("vllm",)
"""Supervised processes that perform no effects and therefore hold no lease."""


def launch(home: Path, environ: Mapping[str, str], *, tied: bool) -> subprocess.Popen[bytes]:
    """Start a supervisor of `home` and return it when it is ready. A `tied` one stops when this process
    ends, however that happens. Otherwise it continues, and after READY_S it is returned as it is,
    because a migration may take long and must not be cut off. Raises Failure with its output when it
    does not start, and Conflict, before the log is emptied, when the home has a supervisor."""
    prepare(home)
    refuse_owned(home)
    log = home / "logs" / "supervisor.log"
    log.write_bytes(
        b""
    )  # drop the old log; new lines are appended, so that the file can be truncated
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
    if not tied:
        return process
    process.terminate()
    raise Failure(
        "FAILED", f"the server is not ready after {READY_S:.0f} s; read the logs in {home / 'logs'}"
    )


def is_ready(home: Path) -> bool:
    """Whether the supervisor that owns the home is ready."""
    state = read_state(home)
    return state is not None and state.ready


def describe_start(home: Path) -> str:
    """A line for people that names the processes that the supervisor of the home still starts, if there
    are any."""
    state = read_state(home)
    if state is None or not state.ready:
        log = home / "logs" / "supervisor.log"
        return f"still starting: the database and the server; the log is {log}"
    with Client() as client:
        leased = _leased_workers(client)
    names = [
        child.name
        for child in state.children
        if child.name not in LEASELESS and child.worker not in leased
    ]
    return f"still starting: {', '.join(names)}" if names else "every process has started"


def await_workers(home: Path, *, within_s: float = WORKERS_S) -> Sequence[ChildState]:
    """Wait until every process of the home's supervisor that performs work holds a live lease. Returns
    those that are still starting after `within_s` seconds, for example because a disk is slow. Raises
    Failure with the names of those that were restarted by then, or when the supervisor has ended."""
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
                return ()
            time.sleep(POLL_S)
    failing = [child for child in missing if child.restarts]
    if failing:
        raise Failure(
            "FAILED",
            "the server answers, but these processes end again and again: "
            f"{', '.join(child.name for child in failing)}; read "
            f"{', '.join(child.log for child in failing)}. The supervisor keeps trying; stop it with "
            "`headrace down`",
        )
    return missing


def _leased_workers(client: Client) -> set[str]:
    """The ids of the workers with a live lease. Empty while the server does not answer."""
    try:
        return {str(worker.get("id")) for worker in client.get("/status").get("workers") or ()}
    except Failure:
        return set()


def _startup_failure(output: str) -> Failure:
    """The failure that a supervisor printed as JSON, or its plain output, as a Failure."""
    last = output.splitlines()[-1] if output else ""
    if not last.startswith('{"schema_version"'):
        return Failure(
            "FAILED",
            output or "the supervisor ended without output; start it with `headrace up` to see why",
        )
    error = json.loads(last)["error"]
    return Failure(str(error["code"]), str(error["message"]))
