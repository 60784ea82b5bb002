"""The conditions that `headrace up --detach` waits for, and how `headrace status` shows a process
that is starting."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.home import ChildState, SupervisorState, own, prepare, write_state
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
    await_workers(home, within_s=30)
    assert len(server.requests) == 2


def test_it_names_the_process_that_does_not_come(server: FakeServer, home: Path) -> None:
    control = ChildState("control", 1, "c-1", 1, "control.log")
    children(home, server.url, control, ChildState("worker", None, "", 0, "/l/worker.log"))
    server.answer("GET", "/status", {**STATUS, "workers": [{"id": "c-1"}]})
    with pytest.raises(Failure) as caught:
        await_workers(home, within_s=0.3)
    assert "did not register within 0 s: worker" in caught.value.message
    assert "/l/worker.log" in caught.value.message


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
