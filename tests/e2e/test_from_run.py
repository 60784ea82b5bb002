"""Samples that a run recorded become datasets, and other runs learn from them."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.kit.kills import arm, fired_points, once
from tests.kit.platform import (
    TINY,
    Platform,
    make_workspace,
    platform,
    run_config,
    verify,
)

pytestmark = [
    pytest.mark.kills,
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.postgres,
    pytest.mark.slow,
]

RECORDED = {"rollout_batch_size": 8, "n_samples_per_prompt": 8, "max_response_length": 32}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    root = tmp_path_factory.mktemp("from-run")
    workspace = make_workspace(root / "workspace")
    environment = arm(once("from_run.written"))
    with platform(root / "home", environment=environment) as started:
        made = started.post("/workspaces", {"url": str(workspace), "name": "w"})
        assert made.status_code == 201, made.text
        started.upload("numbers")
        config = run_config(training=RECORDED, advanced={"max_steps": 2})
        started.wait(started.submit(config, workspace="w", name="first"), "finished")
        yield started


def make(started: Platform, name: str, kind: str, **more: Any) -> Any:
    answer = started.post("/datasets/from-run", {"run": "first", "name": name, "as": kind, **more})
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


def offline(dataset: str, **advanced: Any) -> dict[str, Mapping[str, Any]]:
    """A run on recorded groups with the settings of the run that recorded them."""
    return {
        "experiment": {"model_path": TINY, "dataset": dataset},
        "training": {"lr": 1e-2, "rollout_batch_size": 8},
        "advanced": {
            "execution_mode": "offline",
            "algorithm": "grpo",
            "seed": 7,
            "deterministic": True,
            **advanced,
        },
    }


def weights(started: Platform, run: str) -> dict[int, str]:
    """The hash of the weights of each step."""
    return {
        one["data"]["step"]: one["data"]["state"]["weights_sha256"]
        for one in started.events(run)
        if one["type"] == "rl.policy.updated"
    }


def test_a_server_that_dies_while_rows_are_made_leaves_nothing_half(running: Platform) -> None:
    """The first process is killed with all rows written and nothing registered. The same request, sent
    again, makes the first version."""
    made = make(running, "killed", "sft")
    assert "from_run.written" in fired_points(running.home)
    assert len(running.get("/datasets/killed/versions")["versions"]) == 1
    assert made["dataset"]["version"] == 1
    assert make(running, "killed", "sft")["dataset"]["sha256"] == made["dataset"]["sha256"]
    left = [path for path in (running.home / "uploads").iterdir() if path.is_file()]
    assert not left


def test_a_run_on_recorded_groups_takes_the_recorded_first_step_again(running: Platform) -> None:
    """The batch of step 1 was sampled by version 0, so the same step from there gives the same bits."""
    made = make(running, "step-1", "trajectory", first_step=1, last_step=1)
    assert made["made"]["rows"] == 8
    run = running.submit(offline("step-1", max_steps=3), name="again")
    running.wait(run, "finished")
    first = running.get("/runs/first")["run"]["id"]
    assert weights(running, run)[1] == weights(running, first)[1]
    assert len(set(weights(running, run).values())) == 3
    assert verify(running, run)["status"] == "verified"


def test_a_policy_learns_from_the_groups_of_another_run(running: Platform) -> None:
    """The rewards of fresh samples, which pay for digits, rise over those of the model itself."""
    make(running, "all", "trajectory")
    config = offline("all", max_steps=8, validation_dataset="numbers", validation_samples=4)
    config["experiment"] = {**config["experiment"], "rollout": "say", "entrypoint": "main.py"}
    config["advanced"] = {**config["advanced"], "validation_temperature": 1.0}
    config["training"] = {**config["training"], "max_prompt_length": 64, "max_response_length": 32}
    info = running.wait(running.submit(config, workspace="w", name="offline"), "finished")
    assert info["run"]["execution_mode"] == "offline"
    before, after = (point["value"] for point in info["metrics"]["eval/validation/reward"])
    assert after > before


@pytest.mark.parametrize(
    ("kind", "algorithm", "more"),
    [("sft", "sft", {"best_of_group": True, "dedupe": True}), ("preference", "dpo", {})],
)
def test_answers_of_a_run_are_learned(
    running: Platform, kind: str, algorithm: str, more: dict[str, Any]
) -> None:
    made = make(running, kind, kind, **more)
    config = {
        "experiment": {"model_path": TINY, "dataset": kind},
        "training": {"lr": 1e-2},
        "advanced": {"algorithm": algorithm, "batch_size": 4, "max_steps": 6, "seed": 7},
    }
    info = running.wait(running.submit(config, name=f"by-{kind}"), "finished")
    losses = [point["value"] for point in info["metrics"]["train/loss"]]
    assert losses[-1] < losses[0]
    assert made["dataset"]["origin"]["name"] == "first"
