"""Long commands say on stderr that they wait, and say nothing to programs."""

import io
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from infra.operations.local.home import ChildState, SupervisorState, own, prepare, write_state
from producers.cli.display import waiting
from producers.cli.display.output import say_aside
from producers.cli.display.run_view import RunView
from producers.cli.display.waiting import told_while_waiting
from producers.cli.launch import describe_start
from producers.cli.watch import draw_panel
from tests.unit.producers.cli.conftest import Answer, FakeServer, Run
from tests.unit.producers.cli.test_watch import STORY, sse

PATIENCE_S = 30.0


def waiting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "waiting"]


class SlowServer:
    """Answers `path` of a fake server only after a line about the wait was said. After `stop_waiting` it
    answers at once, and notes in `threads` which threads could say such a line."""

    def __init__(self, server: FakeServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        told, take, say = threading.Event(), server.take, say_aside

        def slow(method: str, asked: str) -> Answer | None:
            if asked == f"/api/v1{path}":
                self.threads = waiting_threads()
                told.wait(PATIENCE_S if self.is_waited_for else 0)
            return take(method, asked)

        def noted(text: str) -> None:
            say(text)
            told.set()

        self.threads = list[threading.Thread]()
        self.is_waited_for = True
        monkeypatch.setattr(server, "take", slow)
        monkeypatch.setattr(waiting, "FIRST_S", 0.01)
        monkeypatch.setattr(waiting, "say_aside", noted)

    def stop_waiting(self) -> None:
        self.is_waited_for = False
        for thread in waiting_threads():
            thread.join(PATIENCE_S)


def test_a_chat_says_that_its_model_loads(
    server: FakeServer, headrace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/checkpoints/r@last/chat"
    server.answer("POST", path, {"message": {"role": "assistant", "content": "85"}})
    slow = SlowServer(server, path, monkeypatch)
    ran = headrace("checkpoint", "chat", "r@last", "--message", "47+38?")
    assert ran.out == "85\n"
    assert "waiting for the answer of r@last; a worker loads the model" in ran.err
    slow.stop_waiting()
    ran = headrace("checkpoint", "chat", "r@last", "--message", "47+38?", "--json")
    assert ran.document["message"]["content"] == "85"
    assert slow.threads == []


def test_a_verification_says_that_it_rebuilds(
    server: FakeServer, headrace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    verification: dict[str, Any] = {"id": "v", "status": "verified", "findings": [], "forks": []}
    figures = {"steps": 1, "checkpoints": 1, "artifacts": 1, "adapter_sha256": "a"}
    server.answer("POST", "/runs/r/verify", {"verification": {"id": "v"}}, 202)
    server.answer("GET", "/verifications/v", {"verification": verification | figures})
    slow = SlowServer(server, "/verifications/v", monkeypatch)
    ran = headrace("train", "verify", "r")
    assert ran.code == 0, ran.err
    assert "rebuilding r from its log (" in ran.err
    slow.stop_waiting()
    assert headrace("train", "verify", "r", "--json").code == 0
    assert slow.threads == []


def test_nothing_is_said_of_a_short_wait(capsys: pytest.CaptureFixture[str]) -> None:
    with told_while_waiting(lambda: "late"):
        pass
    assert capsys.readouterr().err == ""


def test_a_start_names_the_processes_without_a_lease(server: FakeServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    prepare(home)
    with own(home):
        assert "the database and the server; the log is" in describe_start(home)
        children = tuple(
            ChildState(name, 1, worker, 1, "log")
            for name, worker in (("control", "c-1"), ("worker", "w-1"), ("vllm", "v-1"))
        )
        write_state(
            home,
            SupervisorState(os.getpid(), server.url, ready=True, started_at="", children=children),
        )
        for leased in (["c-1"], ["c-1", "w-1"]):
            server.answer("GET", "/status", {"workers": [{"id": worker} for worker in leased]})
        assert describe_start(home) == "still starting: worker"
        assert describe_start(home) == "every process has started"


def test_up_detach_says_what_it_waits_for(
    server: FakeServer, headrace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()

    def launch(*_: object, **__: object) -> SimpleNamespace:
        told.wait(PATIENCE_S)
        return SimpleNamespace(pid=7)

    def noted(text: str) -> None:
        assert "still starting: the database and the server" in text
        told.set()

    monkeypatch.setattr(waiting, "FIRST_S", 0.01)
    monkeypatch.setattr(waiting, "say_aside", noted)
    monkeypatch.setattr("producers.cli.launch.launch", launch)
    assert headrace("up", "--detach").code == 0
    assert told.is_set()


def test_an_interrupted_up_detach_says_that_the_start_continues(
    server: FakeServer, headrace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("producers.cli.launch.launch", launch)
    ran = headrace("up", "--detach")
    assert ran.code == 130
    assert "goes on starting" in ran.err
    assert "`headrace down` stops it" in ran.err


def test_watch_in_a_pipe_says_what_a_run_without_events_does(
    server: FakeServer, headrace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"run": {"id": "r", "name": "r", "status": "running"}}
    for done in (16, 16, 32):
        waits = [{"what": "effect", "message": f"sampling step 1: {done} of 128"}]
        server.answer("GET", "/runs/r", {**run, "waiting_for": waits})
    server.raw("GET", "/runs/r/events", sse(STORY[:2]), kind="text/event-stream")
    server.raw("GET", "/runs/r/events", b"", kind="text/event-stream")
    take = server.take

    def ends_when_asked_four_times(method: str, path: str) -> Answer | None:
        asked = [request for request in server.requests if request.path == "/api/v1/runs/r"]
        if path.endswith("/events") and len(asked) > 3:
            return 200, "text/event-stream", sse(STORY[2:])
        return take(method, path)

    monkeypatch.setattr(server, "take", ends_when_asked_four_times)
    monkeypatch.setattr("producers.cli.event_stream.PAUSE_S", 0.01)
    monkeypatch.setattr("producers.cli.watch.PIPE_S", 0.05)
    ran = headrace("train", "watch", "r")
    assert ran.code == 0, ran.err
    assert ran.out.count("r: sampling step 1: 16 of 128\n") == 1, "it is told once"
    assert ran.out.count("r: sampling step 1: 32 of 128\n") == 1


def test_a_panel_shows_what_the_run_does() -> None:
    shown = Console(width=100, record=True, file=io.StringIO())
    shown.print(draw_panel(RunView(), "r", doing="sampling step 1: 16 of 128"))
    assert "sampling step 1: 16 of 128" in shown.export_text()


def test_a_step_without_samples_is_told_with_the_steps_that_there_are(
    server: FakeServer, headrace: Run
) -> None:
    server.answer("GET", "/runs/r/samples", {"samples": [], "total_count": 0})
    server.answer("GET", "/runs/r", {"run": {"id": "r", "current_step": 8}})
    ran = headrace("train", "samples", "r", "--step", "99")
    assert ran.out == "no samples of step 99 here; r has taken steps 1 to 8\n"
    assert headrace("train", "samples", "r", "--step", "99", "--json").document["samples"] == []


def test_a_run_on_a_dataset_of_answers_says_why_it_has_no_samples(
    server: FakeServer, headrace: Run
) -> None:
    server.answer("GET", "/runs/r/samples", {"samples": []})
    server.answer("GET", "/runs/r", {"run": {"algorithm": "dpo", "current_step": 8}})
    ran = headrace("train", "samples", "r")
    assert ran.out == "r has no samples, because dpo learns the answers of its dataset\n"
