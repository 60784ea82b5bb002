"""The supervisor over small real processes: restarts, order, and that no process outlives it."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from consumers.registry import lanes_of, load
from infra.operations.local import child, supervisor
from infra.operations.local.child import (
    AWAY,
    LARGEST_LOG_BYTES,
    Child,
    ChildSpec,
    pause_s,
    rotate_log,
)
from infra.operations.local.free_port import free_port
from infra.operations.local.supervisor import (
    HOSTED,
    SERVING,
    check_port,
    child_specs,
    fork_server,
    tail,
)
from infra.settings.settings import Settings
from schemas.effects import Lane
from schemas.errors import Conflict
from tests.kit.platform import PATIENCE, ROOT, eventually

pytestmark = pytest.mark.processes

SERVER = """
import http.server, os, signal, sys
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
def stop(*_):
    open(sys.argv[2], "a").write("control\\n"); os._exit(0)
signal.signal(signal.SIGTERM, stop)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""

WORKER = """
import os, signal, sys
def stop(*_):
    open(sys.argv[1], "a").write("worker\\n"); os._exit(0)
signal.signal(signal.SIGTERM, stop)
while True: signal.pause()
"""

SUPERVISOR = """
import os, pathlib, sys
from infra.operations.local import home, lost_leases, supervisor
from consumers.registry import lanes_of, load
from infra.operations.local import child, supervisor
from infra.operations.local.child import Child, ChildSpec
from infra.settings.settings import Settings

root, port = pathlib.Path(sys.argv[1]), sys.argv[2]
settings = Settings.load({"HEADRACE_HOME": str(root), "HEADRACE_URL": f"http://127.0.0.1:{port}"})
home.prepare(root)

async def expire(url, worker):
    (root / "expired").open("a").write(worker + "\\n")

supervisor._expire = expire

async def live(url, workers):
    (root / "looks").open("a").write(".")
    if not (root / "back").exists() and sys.argv[4].startswith("import pathlib"):
        return None  # the database does not answer
    gone = (root / "lost").read_text().split() if (root / "lost").exists() else ()
    return frozenset(workers) - frozenset(gone)

supervisor.live_workers = live
lost_leases.LOOK_S, lost_leases.LEASELESS_S = 0.05, 0.3
children = tuple(
    Child(ChildSpec(name, [sys.executable, "-c", code, *arguments], os.environ, stop_s=2,
                    leased=name == "worker"),
          log=root / "logs" / (name + ".log"))
    for name, code, arguments in (
        ("control", sys.argv[3], [port, str(root / "order")]),
        ("worker", sys.argv[4], [str(root / "order")]),
    )
)
with home.own(root):
    supervisor.Supervisor(settings, children, url="").run(lambda: print("ready", flush=True))
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Started:
    def __init__(
        self, root: Path, *, control: str = SERVER, worker: str = WORKER, before: str = ""
    ) -> None:
        self.root = root
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                before + SUPERVISOR,
                str(root),
                str(free_port()),
                control,
                worker,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def child(self, name: str) -> Any:
        state = json.loads((self.root / "supervisor.json").read_text())
        return next(child for child in state["children"] if child["name"] == name)

    def pids(self) -> list[int]:
        return [self.child("control")["pid"], self.child("worker")["pid"]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    made: list[Started] = []

    def starter(**options: str) -> Started:
        made.append(Started(tmp_path / "home", **options))
        return made[-1]

    yield starter
    for started in made:
        if started.process.poll() is None:
            started.process.terminate()
        started.process.communicate(timeout=60)


def test_a_dead_child_is_restarted_at_once_and_its_lease_is_ended(
    start: Callable[..., Started],
) -> None:
    started = start()
    started.wait_ready()
    first = started.child("worker")
    killed_at = time.monotonic()
    os.kill(first["pid"], signal.SIGKILL)
    second = eventually(
        lambda: c if (c := started.child("worker"))["pid"] != first["pid"] else None,
        within_s=20,
        what="the worker is started again",
        every_s=0.01,
    )
    assert time.monotonic() - killed_at < 5 * PATIENCE
    assert second["starts"] == 2
    assert second["worker"] != first["worker"]
    assert (started.root / "expired").read_text().split() == [first["worker"]]
    assert alive(second["pid"])


SHORT_LOGS = """
from consumers.registry import lanes_of, load
from infra.operations.local import child, supervisor
child.LARGEST_LOG_BYTES, supervisor.LOGS_S = 1 << 16, 0.02
"""

CHATTY = """
import os, sys, time
for number in range(1 << 62):
    os.write(1, b"%020d\\n" % number)
    if number % 64 == 0: time.sleep(0.002)
"""


def test_a_log_is_shortened_while_it_is_written(start: Callable[..., Started]) -> None:
    started = start(worker=CHATTY, before=SHORT_LOGS)
    started.wait_ready()
    log = started.root / "logs" / "worker.log"
    former = log.with_suffix(".log.1")

    def number(file: Path) -> int:
        lines = file.read_bytes().split() if file.exists() else []
        return int(lines[-2]) if len(lines) > 2 else 0

    seen = [0]
    for _ in range(3):
        seen.append(
            eventually(
                lambda: n if (n := number(former)) > seen[-1] else None,
                within_s=30,
                what="the log was put aside",
            )
        )
        assert log.stat().st_size < 1 << 22
        assert former.stat().st_size < 1 << 22
    assert started.child("worker")["starts"] == 1, "its writer goes on"
    eventually(lambda: True if number(log) > seen[-1] else None, within_s=30, what="and writes")


def test_twin_without_shortening_it_grows(start: Callable[..., Started]) -> None:
    started = start(worker=CHATTY, before="children = None")
    started.wait_ready()
    log = started.root / "logs" / "worker.log"
    eventually(lambda: True if log.stat().st_size > 1 << 20 else None, within_s=60, what="a MiB")
    assert not log.with_suffix(".log.1").exists()


def test_of_a_flooded_log_only_the_end_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "LARGEST_LOG_BYTES", 1000)
    log = tmp_path / "a.log"
    log.write_bytes(b"old" * 10_000 + b"n" * 1000)
    rotate_log(log)
    assert log.stat().st_size == 0
    assert log.with_suffix(".log.1").read_bytes() == b"n" * 1000


def test_a_log_that_grows_fast_is_checked_often(tmp_path: Path) -> None:
    settings = Settings.load({"HEADRACE_HOME": str(tmp_path)})
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "a.log"
    watching = supervisor.Supervisor(settings, (), url="")
    found = []
    for size in (10, 20, supervisor.FLOOD_BYTES * 2, supervisor.FLOOD_BYTES * 2, 5, 5):
        log.touch()
        os.truncate(log, size)
        watching._rotate_logs()
        found.append(watching._is_flooded)
    assert found == [False, False, True, False, True, False]


def test_shortening_follows_no_link(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"x")
    os.truncate(large, LARGEST_LOG_BYTES + 1)
    (tmp_path / "a.log").symlink_to(large)
    rotate_log(tmp_path / "a.log")
    assert large.stat().st_size > LARGEST_LOG_BYTES
    (tmp_path / "large.log").hardlink_to(large)
    (tmp_path / "other").write_text("not a log")
    (tmp_path / "large.log.1").symlink_to(tmp_path / "other")
    rotate_log(tmp_path / "large.log")
    assert large.stat().st_size == 0
    assert (tmp_path / "other").read_text() == "not a log"


def test_a_child_without_a_lease_is_ended_and_started_again(start: Callable[..., Started]) -> None:
    """The process is alive but holds no lease, so the work that it held would never be
    continued."""
    started = start()
    started.wait_ready()
    first = started.child("worker")
    looks = started.root / "looks"
    eventually(lambda: looks.exists() or None, within_s=20, what="it was seen with its lease")
    (started.root / "lost").write_text(first["worker"])
    second = eventually(
        lambda: c if (c := started.child("worker"))["pid"] not in (first["pid"], None) else None,
        within_s=20,
        what="the worker is started again",
    )
    assert second["note"].startswith("was killed: no lease for")
    assert not alive(first["pid"])
    assert (started.root / "expired").read_text().split() == [first["worker"]]


def test_a_child_that_was_stopped_is_not_ended_for_its_lease(
    start: Callable[..., Started],
) -> None:
    started = start()
    started.wait_ready()
    first = started.child("worker")
    os.kill(first["pid"], signal.SIGSTOP)
    try:
        (started.root / "lost").write_text(first["worker"])
        looks = started.root / "looks"
        wanted = looks.stat().st_size + 20
        eventually(
            lambda: looks.stat().st_size > wanted or None, within_s=20, what="it is looked at"
        )
        assert started.child("worker")["pid"] == first["pid"]
    finally:
        os.kill(first["pid"], signal.SIGCONT)


def test_everything_stops_in_order_on_sigterm(start: Callable[..., Started]) -> None:
    started = start()
    started.wait_ready()
    pids = started.pids()
    started.process.terminate()
    assert started.process.wait(60) == 0
    assert (started.root / "order").read_text().split() == ["worker", "control"]
    assert not any(alive(pid) for pid in pids)


def test_a_child_that_does_not_stop_is_killed(start: Callable[..., Started]) -> None:
    deaf = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()"
    )
    started = start(worker=deaf)
    started.wait_ready()
    pids = started.pids()
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(60) == 0
    assert not any(alive(pid) for pid in pids)


def test_children_die_with_a_supervisor_that_is_killed(start: Callable[..., Started]) -> None:
    started = start()
    started.wait_ready()
    pids = started.pids()
    started.process.kill()
    eventually(
        lambda: not any(alive(pid) for pid in pids) or None, within_s=20, what="they die with it"
    )


def test_a_control_process_that_never_starts_ends_it_with_the_end_of_its_log(
    start: Callable[..., Started],
) -> None:
    started = start(control="raise SystemExit('the reason')")
    _, said = started.process.communicate(timeout=60)
    assert started.process.returncode == 1
    assert "the reason" in said


def test_pauses_grow_and_are_capped() -> None:
    assert [pause_s(n) for n in range(5)] == [0.0, 0.0, 0.1, 0.2, 0.4]
    assert pause_s(1000) == 10.0


def test_a_crash_loop_is_slowed_down_and_forgiven(tmp_path: Path) -> None:
    now = [0.0]
    spec = ChildSpec("c", [sys.executable, "-c", "pass"], os.environ, stop_s=1)
    child = Child(spec, log=tmp_path / "c.log", clock=lambda: now[0])
    due: list[float | None] = []
    for _ in range(3):
        child.start()
        eventually(lambda: child.reap() is not None or None, within_s=20, what="it ends")
        due.append(child.due_in_s())
        now[0] += 1.0
    assert due == pytest.approx([0.0, 0.1, 0.2])
    child.start()
    now[0] += 60.0
    eventually(lambda: child.reap() is not None or None, within_s=20, what="it ends")
    assert child.due_in_s() == 0.0


def test_a_child_that_finds_something_away_is_started_less_and_less_often(tmp_path: Path) -> None:
    """Also when each start takes longer than the deaths of a crash loop."""
    now = [0.0]
    away = [sys.executable, "-c", f"raise SystemExit({AWAY})"]
    child = Child(
        ChildSpec("c", away, os.environ, stop_s=1), log=tmp_path / "c.log", clock=lambda: now[0]
    )
    due: list[float | None] = []
    for lived_s in (2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 99.0):
        child.start()
        now[0] += lived_s
        eventually(lambda: child.reap() is not None or None, within_s=20, what="it ends")
        due.append(child.due_in_s())
    assert due == pytest.approx([1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 1.0])


def test_a_child_that_waits_says_why_once(start: Callable[..., Started]) -> None:
    ends = (
        "import pathlib, sys\n"
        "if not pathlib.Path(sys.argv[1]).with_name('back').exists():\n"
        f"    print('no Postgres answers', flush=True)\n    raise SystemExit({AWAY})\n"
    )
    logs = "import logging\nlogging.basicConfig(level=logging.INFO)\n"
    logs += (
        "import infra.operations.local.child\ninfra.operations.local.child.FIRST_WAIT_S = 0.05\n"
    )
    started = start(worker=ends + WORKER, before=logs)
    started.wait_ready()
    eventually(
        lambda: started.child("worker")["starts"] > 4 or None, within_s=30, what="it is started"
    )
    assert started.child("worker")["note"] == "waits: no Postgres answers"
    assert not (started.root / "expired").exists(), "it never had a lease"
    (started.root / "back").touch()
    eventually(
        lambda: started.child("worker")["note"] == "" or None, within_s=60, what="it works again"
    )
    started.process.terminate()
    _, said = started.process.communicate(timeout=60)
    assert said.count("worker cannot work now and is started again until it can: no Postgres") == 1
    assert "worker works again" in said


def test_a_taken_port_is_named_with_what_to_do() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(Conflict, match=rf"port {port} on 127.0.0.1 .*HEADRACE_URL"):
            check_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EACCES, r"may not listen there .*need the rights of root; .*such as 8080"),
        (errno.EADDRNOTAVAIL, r"does not have the address ::1 .*address of this machine"),
        (errno.EADDRINUSE, r"stop the process that listens there, or .*http://\[::1\]:PORT"),
    ],
)
def test_a_port_that_cannot_be_used_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, number: int, told: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(Conflict, match=told) as caught:
        check_port("::1", 80)
    is_taken = number == errno.EADDRINUSE
    assert ("stop the process" in caught.value.message) == is_taken


def test_a_process_that_opens_no_secrets_does_not_get_their_key(tmp_path: Path) -> None:
    keys = {"HEADRACE_SECRET_KEY": "ab" * 32, "HEADRACE_SECRET_KEYS_OLD": "cd" * 32}
    environ = {
        "HEADRACE_HOME": str(tmp_path),
        "HEADRACE_SAMPLER": "vllm",
        "HEADRACE_VLLM_MODEL": "m",
        **keys,
    }
    specs = child_specs(Settings.load(environ), environ, database_url="postgresql:///x")
    for spec in specs:
        keyless = spec.name in ("vllm", "serving")
        assert (keys.items() <= spec.env_vars.items()) == (not keyless)
        assert (not keys.keys() & spec.env_vars.keys()) == keyless


@pytest.mark.parametrize("workers", ["one", "two", "each"])
def test_a_worker_that_opens_no_secrets_does_not_get_their_key(
    workers: str, tmp_path: Path
) -> None:
    keys = {"HEADRACE_SECRET_KEY": "ab" * 32, "HEADRACE_SECRET_KEYS_OLD": "cd" * 32}
    environ = {"HEADRACE_HOME": str(tmp_path), "HEADRACE_WORKERS": workers, **keys}
    _, *specs = child_specs(Settings.load(environ), environ, database_url="postgresql:///x")
    for spec in specs:
        hosted = {**HOSTED[workers], "serving": SERVING}[spec.name]
        lanes = lanes_of([load(name) for name in hosted])
        opens = bool({Lane.USER, Lane.GENERATE, Lane.EXPORT} & set(lanes))
        assert (keys.items() <= spec.env_vars.items()) == opens, spec.name
        assert (not keys.keys() & spec.env_vars.keys()) == (not opens), spec.name
    forks = fork_server(specs, log=tmp_path / "log")
    assert not keys.keys() & forks._env_vars.keys()


HIDDEN = """
import ctypes, os, sys
from infra.operations.local import home, supervisor
from infra.settings.settings import Settings

def is_hidden(_):
    print("dumpable", ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))  # PR_GET_DUMPABLE
    sys.exit()

home.prepare = is_hidden
supervisor.supervise(Settings.load(os.environ), os.environ, on_ready=lambda: None)
"""


def test_the_memory_of_the_supervisor_is_hidden(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN],
        cwd=ROOT,
        env={**os.environ, "HEADRACE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "dumpable 0"


def test_threads_are_set_on_purpose_and_a_user_may_choose(tmp_path: Path) -> None:
    settings = Settings.load({"HEADRACE_HOME": str(tmp_path)})
    control, worker, serving = child_specs(settings, {}, database_url="postgresql:///x")
    assert worker.env_vars["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert worker.env_vars["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 0 < int(worker.env_vars["GOMP_SPINCOUNT"]) < 10_000, "a moment, not milliseconds"
    assert serving.env_vars["OMP_NUM_THREADS"] == worker.env_vars["OMP_NUM_THREADS"]
    assert control.env_vars["HEADRACE_DATABASE_URL"] == "postgresql:///x"
    own = {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "7"}
    _, chosen, _ = child_specs(settings, own, database_url="postgresql:///x")
    assert own.items() <= chosen.env_vars.items()


def test_the_end_of_a_log_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "l").write_text("a" * 5000 + "end")
    assert tail(tmp_path / "l", num_bytes=10) == "aaaaaaaend"
    assert tail(tmp_path / "none") == "(no log)"
