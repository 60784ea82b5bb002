"""`headrace train compare`: the comparison of two runs, for a program and for people. And that of two
checkpoints."""

from typing import Any

import pytest

from tests.unit.producers.cli.conftest import FakeServer, Run

START = "2030-01-01T00:00:00+00:00"


def at(second: int) -> str:
    return f"2030-01-01T00:00:{second:02}+00:00"


def run(name: str, rewards: dict[int, float], *, lr: float, ended: int | None, **extra: Any) -> Any:
    points = [{"step": s, "value": v, "at": at(s)} for s, v in rewards.items()]
    metrics = {
        "rollout/raw_reward": points,
        "time/learn_s": [{"step": s, "value": 0.5, "at": at(s)} for s in rewards],
    }
    return {
        "run": {
            "id": f"id-{name}",
            "name": name,
            "status": "running" if ended is None else "finished",
            "algorithm": "grpo",
            "model": "m",
            "started_at": START,
            "completed_at": None if ended is None else at(ended),
            "config": {
                "training": {"lr": lr, "n": 8},
                "advanced": {"kl_coef": extra.get("kl_coef")},
            },
        },
        "checkpoints": extra.get("checkpoints", []),
        "metrics": metrics | extra.get("metrics", {}),
    }


@pytest.fixture
def two(server: FakeServer) -> FakeServer:
    held_out = [{"step": 0, "value": 0.25, "at": at(0)}]
    tokens = [{"step": s, "value": 100.0, "at": at(s)} for s in (1, 2)]
    a = run(
        "a",
        {1: 0.1, 2: 0.2},
        lr=1e-5,
        ended=40,
        checkpoints=[{"step": 2, "ref": "a@2", "reward": 0.2}],
        metrics={"eval/validation/reward": held_out, "rollout/tokens": tokens},
    )
    b = run("b", {2: 0.3, 3: 0.4}, lr=2e-5, ended=None, kl_coef=0.1)
    server.answer("GET", "/runs/a", a)
    server.answer("GET", "/runs/b", b)
    return server


def test_programs_get_everything_aligned_by_step(two: FakeServer, headrace: Run) -> None:
    found = headrace("train", "compare", "a", "b", "--json").document
    assert [(r["id"], r["status"]) for r in found["runs"]] == [
        ("id-a", "finished"),
        ("id-b", "running"),
    ]
    assert found["metrics"]["rollout/raw_reward"] == [
        {"step": 1, "values": [0.1, None]},
        {"step": 2, "values": [0.2, 0.3]},
        {"step": 3, "values": [None, 0.4]},
    ]
    assert found["held_out"] == {"reward": [{"step": 0, "values": [0.25, None]}]}
    assert found["checkpoints"] == [[{"step": 2, "ref": "a@2", "reward": 0.2}], []]
    assert [request.path for request in two.requests] == ["/api/v1/runs/a", "/api/v1/runs/b"]


def test_runs_with_equal_settings_have_no_table_of_settings(
    server: FakeServer, headrace: Run
) -> None:
    for name in ("a", "b"):
        server.answer("GET", f"/runs/{name}", run(name, {1: 0.1}, lr=1e-5, ended=40))
    assert "Settings that differ" not in headrace("train", "compare", "a", "b").out


def test_settings_that_are_equal_are_left_out(two: FakeServer, headrace: Run) -> None:
    found = headrace("train", "compare", "a", "b", "--json").document
    assert found["settings"] == [
        {"key": "training.lr", "values": ["1e-05", "2e-05"]},
        {"key": "advanced.kl_coef", "values": [None, "0.1"]},
    ]


def test_a_run_that_goes_on_has_taken_until_its_newest_point(
    two: FakeServer, headrace: Run
) -> None:
    totals = headrace("train", "compare", "a", "b", "--json").document["totals"]
    assert totals["wall_s"] == [40.0, 3.0]
    assert totals["sampled_tokens"] == [200.0, None]
    assert totals["learn_s"] == [1.0, 1.0]
    assert "grade_s" not in totals


def test_people_see_settings_curves_held_out_rewards_and_checkpoints(
    two: FakeServer, headrace: Run
) -> None:
    ran = headrace("train", "compare", "a", "b")
    assert ran.code == 0, ran.err
    lines = [" ".join(line.replace("│", " ").split()) for line in ran.out.splitlines()]
    assert "training.lr 1e-05 2e-05" in lines
    assert "wall_s 40 3" in lines
    assert "2 0.2 0.3" in lines
    assert "0 0.25 -" in lines
    assert "checkpoints of a: @2 (0.2)" in lines
    assert "checkpoints of b: none" in lines
    assert not any("training.n" in line for line in lines)


def test_held_out_rewards_are_shown_with_their_intervals(two: FakeServer, headrace: Run) -> None:
    key = "eval/validation/reward"
    values = {key: {0: 0.25, 5: 0.5}, f"{key}/low": {0: 0.125}, f"{key}/high": {0: 0.375}}
    metrics = {
        name: [{"step": s, "value": v, "at": at(s)} for s, v in points.items()]
        for name, points in values.items()
    }
    two.answer("GET", "/runs/c", run("c", {}, lr=1e-5, ended=40, metrics=metrics))
    out = headrace("train", "compare", "a", "c").out
    lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert "0 0.25 0.25 (0.125 to 0.375)" in lines
    assert "5 - 0.5" in lines


def test_checkpoints_are_compared_with_the_intervals_of_their_held_out_rewards(
    server: FakeServer, headrace: Run
) -> None:
    first = {"ref": "a@1", "held_out_reward": 0.25, "held_out_interval": [0.125, 0.375]}
    both = [first, {"ref": "a@2", "held_out_reward": 0.5, "held_out_interval": None}]
    found = {"checkpoints": both, "differences": [], "settings": [], "reason": "no rows"}
    server.answer("GET", "/checkpoints/a@1/compare/a@2", found)
    out = headrace("checkpoint", "compare", "a@1", "a@2").out
    lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert "held_out_reward 0.25 (0.125 to 0.375) 0.5" in lines


def test_an_archived_run_is_said_to_have_no_curves(two: FakeServer, headrace: Run) -> None:
    archived = run("old", {}, lr=1e-5, ended=40)
    archived["run"]["archived_at"] = at(50)
    two.answer("GET", "/runs/old", archived | {"metrics": {}})
    out = headrace("train", "compare", "a", "old").out
    assert "note: old is archived and has no curves; restore it: headrace train restore old" in out
    assert "a is archived" not in out
    found = headrace("train", "compare", "a", "old", "--json").document
    assert [r["archived_at"] for r in found["runs"]] == [None, at(50)]


def test_long_curves_are_thinned_for_people(server: FakeServer, headrace: Run) -> None:
    rewards = {step: step / 100 for step in range(1, 41)}
    for name in ("a", "b"):
        server.answer("GET", f"/runs/{name}", run(name, rewards, lr=1e-5, ended=59))
    out = headrace(
        "train", "compare", "a", "b", "--metric", "rollout/raw_reward", "--rows", "4"
    ).out
    table = out.split("rollout/raw_reward at step")[1]
    steps = [line.split()[1] for line in table.splitlines() if line.startswith("│ ")]
    assert steps == ["1", "14", "27", "40"]
    whole = headrace("train", "compare", "a", "b", "--json").document
    assert len(whole["metrics"]["rollout/raw_reward"]) == 40


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a"], "two or more different runs"),
        ([], "two or more different runs"),
        (["a", "a"], "each of them once"),
        (["a", "b", "--metric", "train/kll"], "rollout/raw_reward"),
        (["a", "b", "--rows", "1"], "--rows"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_a_usage_error(
    two: FakeServer, headrace: Run, arguments: list[str], says: str
) -> None:
    ran = headrace("train", "compare", *arguments)
    assert ran.code == 2
    assert says in ran.err


def test_a_run_that_has_not_begun_is_compared_too(two: FakeServer, headrace: Run) -> None:
    pending = {"run": {"id": "id-c", "name": "c", "status": "pending"}}
    two.answer("GET", "/runs/c", pending)
    found = headrace("train", "compare", "a", "c", "--json").document
    assert found["totals"]["wall_s"] == [40.0, None]
    assert headrace("train", "compare", "a", "c").code == 0
