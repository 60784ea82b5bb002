"""Starting a supervisor (`headrace up`) in the background, and waiting until it is ready."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from infra.home import prepare, read_state
from infra.mortal import die_with
from infra.supervisor import tail
from producers.cli.failures import Failure

READY_S = 300.0


def launch(home: Path, environ: Mapping[str, str], *, tied: bool) -> subprocess.Popen[bytes]:
    """A supervisor of `home` that is ready. `tied`: it stops when this process ends, however that
    happens; otherwise it goes on. Raises Failure with what it said when it does not start."""
    prepare(home)
    log = home / "logs" / "supervisor.log"
    with log.open("wb") as output:
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
            raise _why(tail(log))
        time.sleep(0.05)
    process.terminate()
    raise Failure("FAILED", f"the server did not become ready; look into {home / 'logs'}")


def _why(said: str) -> Failure:
    """The failure that a supervisor printed as JSON, as our own."""
    last = said.splitlines()[-1] if said else ""
    if not last.startswith('{"schema_version"'):
        return Failure("FAILED", said or "the supervisor ended without a word")
    error = json.loads(last)["error"]
    return Failure(str(error["code"]), str(error["message"]))
