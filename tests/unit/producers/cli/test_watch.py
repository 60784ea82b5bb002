"""Following a run: the stream, its resumption, the fold, and leaving while the run continues."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from producers.cli.client import Client, ServerAddress
from producers.cli.display.output import sparkline
from producers.cli.display.run_view import RunView
from producers.cli.errors import Failure
from producers.cli.event_stream import UNREACHABLE_S, follow_events, parse_events
from producers.cli.watch import draw_panel, print_event_line
from tests.unit.producers.cli.conftest import FakeServer, Run


def event(kind: str, second: int = 0, /, **data: Any) -> dict[str, Any]:
    return {"type": kind, "time": f"2030-01-01T00:00:{second:02d}+00:00", "data": data}


STORY = [
    event("rl.run.requested"),
    event("rl.run.started", plan={"total_steps": 2, "batch_size": 3, "num_samples": 4}),
    event("rl.policy.initialized", 1),
    event("rl.evaluation.settled", 1, step=0, reward=0.25),
    event("rl.groups.requested", 1, step=1),
    event(
        "rl.step.settled",
        3,
        step=1,
        metrics={"rollout/raw_reward": 0.5, "rollout/total_lengths": 10.0},
    ),
    event("rl.checkpoint.settled", 3, step=1),
    event("rl.step.settled", 4, step=2, metrics={"rollout/raw_reward": 0.75, "train/loss": 0.1}),
    event("rl.run.finished", 5, step=2),
]


def sse(events: list[dict[str, Any]], first: int = 0) -> bytes:
    return b"".join(
        f"id: c{number}\ndata: {json.dumps(one)}\n\n".encode()
        for number, one in enumerate(events, start=first)
    )


def test_the_stream_is_parsed_with_comments_and_several_data_lines() -> None:
    lines = [": hello", "", "id: 7", 'data: {"a":', "data: 1}", "", "data: {}"]
    assert list(parse_events(lines)) == [("7", {"a": 1})]


def test_a_view_is_the_fold_of_the_events() -> None:
    view = RunView()
    for one in STORY:
        view.fold(one)
    assert (view.status, view.step, view.total_steps) == ("finished", 2, 2)
    assert view.rewards == [0.5, 0.75]
    assert view.validations == [(0, 0.25)]
    assert view.checkpoints == [1]
    assert view.rates == [60.0]


def test_the_newest_held_out_reward_is_shown_with_its_interval(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = RunView()
    ends = {"eval/reward/low": 0.125, "eval/reward/high": 0.375}
    first = event("rl.evaluation.settled", step=0, reward=0.25, metrics=ends)
    view.fold(first)
    assert view.held_out_interval == (0.125, 0.375)
    print_event_line(view, "sums", first)
    Console(width=100).print(draw_panel(view, "sums"))
    line, panel = capsys.readouterr().out.split("\n", 1)
    assert line == "sums: held-out reward at step 0: 0.250  (95 %: 0.125 to 0.375)"
    assert "0.25@0  (95 %: 0.125 to 0.375)" in panel
    second = event("rl.evaluation.settled", step=1, reward=0.5, metrics={"eval/reward/se": 0.0})
    view.fold(second)
    assert view.held_out_interval is None, "an interval is that of the newest reward"
    print_event_line(view, "sums", second)
    assert capsys.readouterr().out == "sums: held-out reward at step 1: 0.500\n"


def test_a_run_on_preferences_shows_its_held_out_accuracy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = RunView()
    for step, (loss, accuracy) in enumerate([(0.75, 0.5), (0.25, 0.875)]):
        held_out = {"eval/validation/loss": loss, "eval/validation/accuracy": accuracy}
        settled = event("rl.step.settled", step, step=step, metrics=held_out)
        view.fold(settled)
        print_event_line(view, "pairs", settled)
    before, after = capsys.readouterr().out.splitlines()
    assert before == "pairs: before step 1: held-out loss 0.7500  held-out accuracy 0.500"
    assert after.endswith("held-out loss 0.2500  held-out accuracy 0.875")
    Console(width=100).print(draw_panel(view, "pairs"))
    assert "0.50@0  0.88@1" in capsys.readouterr().out


def test_a_run_with_a_curriculum_shows_its_pools(capsys: pytest.CaptureFixture[str]) -> None:
    view = RunView()
    for step, metrics in enumerate([{}, {"pool/easy": 3.0, "pool/hard": 2.0, "pool/normal": 11.0}]):
        settled = event("rl.step.settled", step, step=step, metrics=metrics)
        view.fold(settled)
    print_event_line(view, "grow", settled)
    assert capsys.readouterr().out.endswith("rows 3 easy, 2 hard, 11 normal\n")
    Console(width=100).print(draw_panel(view, "grow"))
    assert "rows 3 easy, 2 hard, 11 normal" in capsys.readouterr().out


def test_a_run_with_a_teacher_shows_its_loss_beside_the_reward(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = RunView()
    metrics = {"rollout/raw_reward": 0.5, "train/loss": 0.25, "train/teacher_kl": 0.2}
    view.fold(settled := event("rl.step.settled", 1, step=1, metrics=metrics))
    print_event_line(view, "pupil", settled)
    assert "reward 0.500  loss 0.2500" in capsys.readouterr().out
    Console(width=100).print(draw_panel(view, "pupil"))
    assert "0.250 → 0.250" in capsys.readouterr().out


def test_a_line_of_a_warning_ends_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    view = RunView()
    cure = "set advanced.failed_reward"
    warning = event("rl.run.warned", message=f"{'why ' * 100}{cure}", step=1)
    view.fold(warning)
    print_event_line(view, "sums", warning)
    assert capsys.readouterr().out.endswith(f"{cure}\n")


def test_the_time_left_of_a_fork_is_not_known_at_the_step_with_which_it_begins() -> None:
    view = RunView()
    fork = {"parent": "r", "step": 5, "position": 1, "policy_position": 1}
    view.fold(event("rl.run.started", plan={"total_steps": 10}, fork=fork))
    view.fold(event("rl.policy.initialized", 1))
    view.fold(event("rl.step.settled", 1, step=5, metrics={}))
    assert view.eta_s is None
    view.fold(event("rl.step.settled", 3, step=6, metrics={}))
    assert view.eta_s == pytest.approx(8.0)


def test_the_time_left_follows_from_the_last_steps_and_no_pause_counts() -> None:
    view = RunView()
    steps = [event("rl.step.settled", 1 + 2 * n, step=n, metrics={}) for n in range(1, 4)]
    start = [event("rl.run.started", plan={"total_steps": 10}), event("rl.policy.initialized", 1)]
    for one in (*start, *steps):
        view.fold(one)
    assert view.step_s == [2.0, 2.0, 2.0]
    assert view.eta_s == 14.0
    view.fold(event("rl.run.paused", 8))
    assert view.eta_s is None
    view.fold(event("rl.run.resumed", 50))
    view.fold(event("rl.step.settled", 52, step=4, metrics={}))
    assert view.step_s[-1] == 2.0


def test_a_paused_run_is_paused_and_running_again_when_it_goes_on() -> None:
    view = RunView()
    for one in STORY[:3]:
        view.fold(one)
    view.fold(event("rl.run.paused"))
    assert (view.status, view.has_ended) == ("paused", False)
    view.fold(event("rl.run.resumed"))
    assert view.status == "running"


def test_a_broken_connection_goes_on_behind_the_last_event(server: FakeServer) -> None:
    kind = "text/event-stream"
    server.raw("GET", "/runs/r/events", sse(STORY[:4]), kind=kind)
    server.drop("GET", "/runs/r/events")
    server.raw("GET", "/runs/r/events", sse(STORY[4:], first=4), kind=kind)
    with Client(ServerAddress(server.url, None)) as client:
        assert list(follow_events(client, "r")) == STORY
    assert "Last-Event-ID" not in server.requests[0].headers
    assert server.requests[1].headers["Last-Event-ID"] == "c3"
    assert server.requests[2].headers["Last-Event-ID"] == "c3"


def run_of(server: FakeServer, events: list[dict[str, Any]]) -> None:
    server.answer("GET", "/runs/r", {"run": {"id": "r", "name": "r", "status": "finished"}})
    server.raw("GET", "/runs/r/events", sse(events), kind="text/event-stream")


def test_watch_in_a_pipe_prints_a_line_per_step(server: FakeServer, headrace: Run) -> None:
    run_of(server, STORY)
    ran = headrace("train", "watch", "r")
    assert ran.code == 0
    assert "r: step 1/2 (about 2 s left)  reward 0.500  60 tokens/s" in ran.out
    assert "r: held-out reward at step 0: 0.250" in ran.out
    assert "r: checkpoint r@1" in ran.out


def test_watch_ends_with_1_when_the_run_failed(server: FakeServer, headrace: Run) -> None:
    run_of(server, [*STORY[:2], event("rl.run.failed", kind="error", message="nothing works")])
    ran = headrace("train", "watch", "r", "--json")
    assert ran.code == 1
    assert ran.error["code"] == "RUN_FAILED"
    assert "nothing works" in ran.error["message"]
    shown = headrace("train", "watch", "r")
    assert "r: failed" in shown.out
    assert (shown.out + shown.err).count("nothing works") == 1


def test_sigint_leaves_the_run_and_says_how_to_come_back(
    server: FakeServer, headrace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(server, STORY)

    def interrupt(self: RunView, one: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunView, "fold", interrupt)
    ran = headrace("train", "watch", "r")
    assert ran.code == 130
    assert "the run r continues" in ran.err
    assert "headrace train watch r" in ran.err
    assert "Error" not in ran.err
    assert "Traceback" not in ran.err
    assert headrace("train", "watch", "r", "--json").error["code"] == "INTERRUPTED"


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(sparkline([float(n) for n in range(1000)], width=40)) <= 40
    assert sparkline([]) == ""


def test_a_pause_is_one_word(server: FakeServer, headrace: Run) -> None:
    paused = [*STORY[:3], event("rl.run.paused"), event("rl.run.resumed"), *STORY[3:]]
    run_of(server, paused)
    assert "r: paused\n" in headrace("train", "watch", "r").out


def test_an_evaluation_shows_its_progress_in_a_pipe(
    server: FakeServer, headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.cli.commands.evaluations.evaluation.POLL_S", 0.0)
    config = tmp_path / "e.toml"
    config.write_text("")
    server.answer("POST", "/evals", {"eval": {"id": "e", "name": "mine", "total": 20}}, 201)
    for completed in (0, 1, 2, 3, 20):
        status = "finished" if completed == 20 else "running"
        found = {"id": "e", "name": "mine", "status": status, "completed": completed, "total": 20}
        server.answer("GET", "/evals/e", {"eval": found})
    ran = headrace("eval", "submit", str(config), "--workspace", "w", "--watch")
    assert ran.code == 0, ran.err
    said = [line for line in ran.out.splitlines() if line.startswith("mine: ")]
    assert said == [
        "mine: running: 0 of 20 rows",
        "mine: running: 2 of 20 rows",
        "mine: finished: 20 of 20 rows",
    ]


def test_sigint_leaves_an_evaluation_and_is_no_error(
    server: FakeServer, headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        "producers.cli.commands.evaluations.evaluation.ProgressLines.__call__", interrupt
    )
    config = tmp_path / "e.toml"
    config.write_text("")
    server.answer("POST", "/evals", {"eval": {"id": "e", "name": "mine"}}, 201)
    server.answer("GET", "/evals/e", {"eval": {"id": "e", "status": "running"}})
    ran = headrace("eval", "submit", str(config), "--workspace", "w", "--watch")
    assert ran.code == 130
    assert ran.err == (
        "stopped watching; the evaluation mine continues; resume with: headrace eval info mine\n"
    )


def test_a_restart_after_a_long_quiet_step_is_followed(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time without events does not count: only that without a server."""
    now = [0.0]
    monkeypatch.setattr("producers.cli.event_stream.time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        "producers.cli.event_stream.time.sleep", lambda _: now.__setitem__(0, now[0] + 1000)
    )
    server.raw("GET", "/runs/r/events", sse(STORY[:3]), kind="text/event-stream")
    server.drop("GET", "/runs/r/events")
    server.raw("GET", "/runs/r/events", sse(STORY[3:6], 3), kind="text/event-stream")
    server.answer("GET", "/runs/r/events", {"code": "UNAVAILABLE", "detail": "starting"}, 503)
    server.raw("GET", "/runs/r/events", sse(STORY[6:], 6), kind="text/event-stream")
    with Client(ServerAddress(server.url, "t")) as client:
        assert list(follow_events(client, "r")) == STORY


def test_a_server_that_stays_away_is_told_once_and_then_given_up(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, told = [0.0], []
    monkeypatch.setattr("producers.cli.event_stream.time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        "producers.cli.event_stream.time.sleep", lambda _: now.__setitem__(0, now[0] + 10)
    )
    server.drop("GET", "/runs/r/events")
    with Client(ServerAddress(server.url, "t")) as client, pytest.raises(Failure):
        list(follow_events(client, "r", on_lost=lambda: told.append(now[0])))
    assert told == [10.0]
    assert now[0] > UNREACHABLE_S
