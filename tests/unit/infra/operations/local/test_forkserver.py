"""The fork server: its workers are supervised although it started them, and the platform also works
without it."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.operations.local.forkserver import (
    PR_SET_CHILD_SUBREAPER,
    ForkServer,
    Process,
    reap_orphans,
)
from tests.kit.platform import eventually

pytestmark = pytest.mark.processes

SERVER = """
import os, signal, sys
from consumers.process import fork_server as forkserver

def work(arguments):
    print(os.environ["SAYS"], *arguments, flush=True)
    if "stay" in arguments:
        signal.pause()
    return 7

forkserver.IMPORTED, forkserver.REGISTRY, forkserver.main = (), {}, work
sys.exit(forkserver.serve())
"""
"""The real server, for a worker that needs nothing imported."""

ENVIRONMENT = {**os.environ, "SAYS": "the server"}


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[ForkServer]:
    server = ForkServer([sys.executable, "-c", SERVER], ENVIRONMENT, log=tmp_path / "server.log")
    server.ensure_running()
    yield server
    server.stop()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


def ready(forks: ForkServer) -> None:
    eventually(
        lambda: None if forks.is_starting() else True, within_s=30, what="the server is ready"
    )


def made(forks: ForkServer, log: Path, *arguments: str) -> Process:
    ready(forks)
    worker = forks.fork(arguments, {**ENVIRONMENT, "SAYS": "the worker"}, log)
    assert worker is not None
    return worker


def test_a_worker_has_its_arguments_environment_and_log_and_is_our_child(
    forks: ForkServer, tmp_path: Path
) -> None:
    worker = made(forks, tmp_path / "log", "a", "b")
    assert worker.wait(30) == 7
    assert worker.poll() == 7
    assert (tmp_path / "log").read_text() == "the worker a b\n"


def test_a_worker_that_is_killed_is_known_by_its_signal(forks: ForkServer, tmp_path: Path) -> None:
    worker = made(forks, tmp_path / "log", "stay")
    assert worker.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.05)
    worker.kill()
    assert worker.wait(30) == -signal.SIGKILL
    worker.terminate()  # a dead one may be asked again


def test_a_fork_server_that_starts_or_died_forks_no_worker_and_is_started_again(
    tmp_path: Path,
) -> None:
    now = [0.0]
    program = [sys.executable, "-c", SERVER]
    server = ForkServer(program, ENVIRONMENT, log=tmp_path / "l", clock=lambda: now[0])
    assert server.due_in_s() == 0.0
    assert server.fork((), ENVIRONMENT, tmp_path / "log") is None
    server.ensure_running()
    assert server.is_starting()
    assert server.due_in_s() is None
    ready(server)
    first = server.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    eventually(lambda: server.due_in_s(), within_s=30, what="its death is seen")
    assert not server.is_starting()
    assert server.fork((), ENVIRONMENT, tmp_path / "log") is None
    now[0] += 60.0
    server.ensure_running()
    assert server.pid != first
    assert not server.is_starting(), "workers do not wait for it a second time"
    worker = eventually(
        lambda: server.fork(("a",), ENVIRONMENT, tmp_path / "log"), within_s=30, what="a worker"
    )
    assert worker.wait(30) == 7
    server.stop()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


def test_a_worker_outlives_the_server_and_dies_with_the_supervisor(tmp_path: Path) -> None:
    supervisor = f"""
import os, sys, time
from pathlib import Path
from infra.operations.local.forkserver import ForkServer
log = Path({str(tmp_path / "log")!r})
server = ForkServer([sys.executable, "-c", {SERVER!r}], dict(os.environ), log=log)
server.ensure_running()
while server.is_starting(): time.sleep(0.01)
worker = server.fork(("stay",), dict(os.environ), log)
server.stop()
print(worker.pid, flush=True)
time.sleep(600)
"""
    started = subprocess.Popen(
        [sys.executable, "-c", supervisor], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    assert _alive(pid)
    started.kill()
    started.communicate()
    eventually(lambda: None if _alive(pid) else True, within_s=30, what="the worker is gone")


def test_orphans_are_reaped_and_own_children_are_left(tmp_path: Path) -> None:
    ours = subprocess.Popen([sys.executable, "-c", ""])
    stranger = os.fork()
    if stranger == 0:
        os._exit(0)
    eventually(_zombie(stranger), within_s=30, what="the stranger is dead")
    eventually(_zombie(ours.pid), within_s=30, what="ours is dead")
    deadline = time.monotonic() + 30
    while Path(f"/proc/{stranger}").exists():
        assert time.monotonic() < deadline
        reap_orphans({ours.pid})
        ours.poll()
    assert ours.wait() == 0


def _zombie(pid: int) -> Callable[[], bool | None]:
    stat = Path(f"/proc/{pid}/stat")
    return lambda: True if stat.read_text().rsplit(")", 1)[1].split()[0] == "Z" else None


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
