"""The conditions that `headrace up --detach` waits for, and how `headrace status` shows a process
that is starting."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.operations.local.home import ChildState, SupervisorState, own, prepare, write_state
from producers.cli import launch
from producers.cli.errors import Failure
from producers.cli.launch import await_workers
from tests.unit.producers.cli.conftest import FakeServer, Run

STATUS = {"version": "0", "home": "/h", "workers": []}


@pytest.fixture
def home(server: FakeServer, tmp_path: Path) -> Iterator[Path]:
    """A home that is owned by a supervisor: this process."""
    path = tmp_path / "home"
    prepare(path)
    with own(path):
        yield path


def children(home: Path, url: str, *states: ChildState) -> None:
    state = SupervisorState(os.getpid(), url, ready=True, started_at="now", children=states)
    write_state(home, state)


def test_it_returns_once_control_and_workers_hold_their_leases(
    server: FakeServer, home: Path
) -> None:
    control = ChildState("control", 1, "c-1", 1, "control.log")
    vllm = ChildState("vllm", 3, "v-1", 1, "vllm.log")
    children(home, server.url, control, vllm, ChildState("worker", 2, "w-1", 1, "worker.log"))
    server.answer("GET", "/status", {**STATUS, "workers": [{"id": "c-1"}]})
    server.answer("GET", "/status", {**STATUS, "workers": [{"id": "c-1"}, {"id": "w-1"}]})
    assert await_workers(home, within_s=30) == ()
    assert len(server.requests) == 2


CONTROL = ChildState("control", 1, "c-1", 1, "control.log")


def test_it_names_the_process_that_ends_again_and_again(server: FakeServer, home: Path) -> None:
    children(home, server.url, CONTROL, ChildState("worker", None, "", 2, "/l/worker.log"))
    server.answer("GET", "/status", {**STATUS, "workers": [{"id": "c-1"}]})
    with pytest.raises(Failure) as caught:
        await_workers(home, within_s=0.3)
    assert "these processes end again and again: worker" in caught.value.message
    assert "/l/worker.log" in caught.value.message


@pytest.mark.parametrize("starts", [0, 1])
def test_it_names_the_process_that_is_still_starting(
    server: FakeServer, home: Path, starts: int
) -> None:
    worker = ChildState("worker", None, "", starts, "/l/worker.log")
    children(home, server.url, CONTROL, worker)
    server.answer("GET", "/status", {**STATUS, "workers": [{"id": "c-1"}]})
    assert await_workers(home, within_s=0.3) == [worker]


def test_a_starting_process_is_named_and_is_not_a_failure(
    home: Path, headrace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = subprocess.Popen(["/bin/true"])
    started.wait()
    worker = ChildState("worker", 2, "", 1, "/l/worker.log")
    monkeypatch.setattr("producers.cli.launch.launch", lambda *_, **__: started)
    monkeypatch.setattr("producers.cli.launch.is_ready", lambda _: True)
    monkeypatch.setattr("producers.cli.launch.await_workers", lambda _: (worker,))
    ran = headrace("up", "--detach")
    assert ran.code == 0, ran.err
    assert "Still starting: worker; `headrace status` shows it" in ran.out
    assert json.loads(headrace("up", "--detach", "--json").out)["starting"] == ["worker"]


def test_a_server_that_is_not_ready_yet_goes_on_and_is_told(
    server: FakeServer, tmp_path: Path, headrace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long migration, for example. It used to be ended after five minutes."""
    monkeypatch.setattr(launch, "READY_S", 0.2)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    started = list[subprocess.Popen[bytes]]()

    def start(_: object, **more: Any) -> subprocess.Popen[bytes]:
        started.append(popen(command, **more))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    try:
        shown, told = headrace("up", "--detach"), headrace("up", "--detach", "--json")
        assert [process.poll() for process in started] == [None, None]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert shown.code == told.code == 0, shown.err
    assert f"Still starting: the server (pid {started[0].pid})" in shown.out
    assert json.loads(told.out)["starting"] == ["server"]


def test_a_second_up_keeps_the_log_of_the_supervisor_that_runs(
    home: Path, headrace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(home))
    log = home / "logs" / "supervisor.log"
    log.write_text("worker ended\n")
    refused = headrace("up", "--detach")
    assert refused.code == 1
    assert f"a supervisor (pid {os.getpid()}) already runs on {home}" in refused.err
    assert log.read_text() == "worker ended\n"


def test_a_supervisor_that_ended_is_told(server: FakeServer, tmp_path: Path) -> None:
    prepare(tmp_path / "gone")
    (tmp_path / "gone" / "logs" / "supervisor.log").write_text("it fell over\n")
    with pytest.raises(Failure, match="it fell over"):
        await_workers(tmp_path / "gone", within_s=30)


def test_a_process_before_its_first_start_has_no_restarts(
    server: FakeServer, home: Path, headrace: Run
) -> None:
    children(home, server.url, ChildState("worker", None, "", 0, "worker.log"))
    server.answer("GET", "/status", STATUS)
    shown = headrace("status")
    assert shown.code == 0, shown.err
    assert "-1" not in shown.out
    assert "starting" in shown.out
