"""Every objective on the platform: submitted as by TOML, trained, and rebuilt to the same bits."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.families import family, save_random_model
from tests.kit.objectives import PREFERENCES, RUNS
from tests.kit.platform import (
    TINY,
    Platform,
    eventually,
    final_adapter,
    make_workspace,
    platform,
    run_config,
    verify,
)
from tests.kit.preference_rows import pairs, singles

pytestmark = [
    pytest.mark.kills,
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.postgres,
    pytest.mark.slow,
]

TALKATIVE = {"temperature": 1.0, "max_prompt_length": 64, "max_response_length": 6}
"""How a teacher is evaluated for its answers."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    root = tmp_path_factory.mktemp("algorithms")
    workspace = make_workspace(root / "workspace")
    with platform(root / "home") as started:
        made = started.post("/workspaces", {"url": str(workspace), "name": "w"})
        assert made.status_code == 201, made.text
        started.upload("numbers")
        started.upload("pairs", pairs(range(10, 42)))
        started.upload("singles", singles(range(10, 42)))
        started.upload("held-out", pairs(range(50, 66)))
        yield started


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_every_objective_takes_all_its_steps(running: Platform, name: str) -> None:
    run = running.submit(run_config(advanced=RUNS[name]), workspace="w", name=name)
    info = running.wait(run, "finished")
    assert info["run"]["current_step"] == 4
    losses = [point["value"] for point in info["metrics"]["train/loss"]]
    assert losses
    assert any(loss != 0 for loss in losses)


@pytest.mark.parametrize("name", PREFERENCES)
def test_the_better_of_two_held_out_answers_is_found(running: Platform, name: str) -> None:
    """Short answers are the better ones. A model that knows nothing finds half of them."""
    config = {
        "experiment": {
            "model_path": TINY,
            "dataset": "singles" if name == "kto" else "pairs",
        },
        "training": {"lr": 3e-3},
        "checkpoints": {"eval_interval": 10},
        "advanced": {
            **PREFERENCES[name],
            "validation_dataset": "held-out",
            "batch_size": 8,
            "max_steps": 20,
            "seed": 3,
        },
    }
    info = running.wait(running.submit(config, name=name), "finished")
    accuracy = [point["value"] for point in info["metrics"]["eval/validation/accuracy"]]
    losses = [point["value"] for point in info["metrics"]["eval/validation/loss"]]
    assert len(accuracy) == 3
    assert accuracy[-1] > 0.9, accuracy
    assert losses[-1] < losses[0], losses
    margins = [point["value"] for point in info["metrics"]["rewards/margins"]]
    assert margins[-1] > margins[0]


def test_ppo_again_ends_in_the_same_bits_with_other_state_intervals(running: Platform) -> None:
    """Recovery replays steps from an older state: the critic and both optimizers are in it."""
    found = set()
    for interval in (1, 2):
        config = run_config(advanced={**RUNS["ppo"], "state_interval": interval})
        run = running.submit(config, workspace="w")
        found.add(final_adapter(running.wait(run, "finished")))
    assert len(found) == 1


def test_a_filtered_group_is_replaced_and_the_log_says_so(running: Platform) -> None:
    """Rewards of a model that says no digit are all 0: every slot is asked for again."""
    config = run_config(
        training={"max_response_length": 1},
        advanced={"algorithm": "dapo", "max_replacements": 2, "max_steps": 2},
    )
    run = running.submit(config, workspace="w", name="filtered")
    info = running.wait(run, "finished")
    dropped = [point["value"] for point in info["metrics"]["rollout/dropped_groups"]]
    asked = [e for e in running.events(run) if e["type"] == "rl.groups.requested"]
    replaced = [slot for e in asked for slot in e["data"]["slots"] if slot["replacement"]]
    settled = [
        g
        for e in running.events(run)
        if e["type"] == "rl.groups.settled"
        for g in e["data"]["groups"]
    ]
    flat = [g for g in settled if g["dropped"] == "all its rewards are equal"]
    assert sum(dropped) == len(flat) > 0
    assert replaced
    assert {slot["replacement"] for slot in replaced} <= {1, 2}


def test_a_run_learns_from_a_checkpoint_and_is_rebuilt_from_its_log(running: Platform) -> None:
    """Both begin with the same base. The student gets near the teacher without a reward."""
    taught = run_config(training={"lr": 3e-2, "rollout_batch_size": 4}, advanced={"max_steps": 12})
    running.wait(running.submit(taught, workspace="w", name="teacher"), "finished")
    config = run_config(
        training={"lr": 3e-2, "rollout_batch_size": 4},
        advanced={"algorithm": "distill", "teacher": "teacher@last", "max_steps": 12},
    )
    run = running.submit(config, workspace="w", name="student")
    info = running.wait(run, "finished")
    values = {key: [p["value"] for p in points] for key, points in info["metrics"].items()}
    assert values["train/loss"][-1] < values["train/loss"][0] / 2, values["train/loss"]
    (started,) = [e["data"] for e in running.events(run) if e["type"] == "rl.run.started"]
    assert started["spec"]["teacher"]["name"] == "teacher@12"
    assert started["spec"]["teacher"]["weights"] is not None
    assert verify(running, run)["status"] == "verified"


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [("gemma3", True), ("phi3-window", True), ("gemma3-bounded", False)],
)
def test_a_run_of_another_architecture_is_rebuilt_from_its_log(
    running: Platform, name: str, deterministic: bool, tmp_path: Path
) -> None:
    """By the lean decoder, and through Transformers with several rows at once."""
    save_random_model(family(name).config(), tmp_path)
    config = run_config(
        experiment={"model_path": str(tmp_path)},
        advanced={"max_steps": 2, "deterministic": deterministic},
    )
    run = running.submit(config, workspace="w", name=name)
    info = running.wait(run, "finished")
    values = {key: [p["value"] for p in points] for key, points in info["metrics"].items()}
    assert max(values["train/sampler_mismatch"]) < 1e-5
    assert verify(running, run)["status"] == "verified"


def test_the_answers_of_a_teacher_are_a_dataset_for_sft(running: Platform) -> None:
    """As the page says: evaluate the teacher, keep the conversations with a reward, upload them."""
    experiment = run_config()["experiment"]
    config = {"experiment": experiment, "evaluation": {"n": 2, "limit": 8}, "advanced": TALKATIVE}
    made = running.post("/evals", {"config": config, "workspace": "w"})
    assert made.status_code == 201, made.text
    name = made.json()["eval"]["id"]

    def look() -> Any:
        return running.get(f"/evals/{name}")["eval"]["status"] == "finished" or None

    eventually(look, within_s=120, what="the evaluation ends")
    attempts = running.get(f"/evals/{name}/samples", limit=50)["samples"]
    assert len(attempts) == 16
    kept = [{"messages": one["messages"]} for one in attempts if one["reward"] is not None]
    running.upload("answers", "".join(json.dumps(line) + "\n" for line in kept))
    sft = {
        "experiment": {"model_path": TINY, "dataset": "answers"},
        "training": {"lr": 1e-2},
        "advanced": {"algorithm": "sft", "batch_size": 8, "max_steps": 20},
    }
    info = running.wait(running.submit(sft, name="imitator"), "finished")
    losses = [point["value"] for point in info["metrics"]["train/loss"]]
    assert losses[-1] < losses[0] - 0.1, losses


def test_a_run_teaches_itself_with_a_hint(running: Platform) -> None:
    """The answer with the hint is what the model learns to say without it."""
    advanced = {"algorithm": "distill", "teacher": "self", "teacher_hint": "It is {ground_truth}."}
    run = running.submit(run_config(advanced=advanced), workspace="w", name="hinted")
    info = running.wait(run, "finished")
    assert all(point["value"] > 0 for point in info["metrics"]["train/loss"])
    assert verify(running, run)["status"] == "verified"


TWO_PARTS = """
from headrace import AgentWorkflow, reward


class Say(AgentWorkflow):
    async def run(self, ctx):
        return [*ctx.prompt, await ctx.chat(ctx.prompt)]


@reward
def digits(solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(character.isdigit() for character in solution_str) / 8


@reward
def brief(solution_str, ground_truth, extra_info=None, **kwargs):
    return -float(len(solution_str))
"""


def test_gdpo_trains_on_the_parts_of_rewards_and_is_rebuilt_from_its_log(
    tmp_path: Path, running: Platform
) -> None:
    files = {"rollouts/say/main.py": TWO_PARTS}
    workspace = make_workspace(tmp_path / "workspace", files)
    made = running.post("/workspaces", {"url": str(workspace), "name": "parts"})
    assert made.status_code == 201, made.text
    rewards = [{"name": "digits", "weight": 1.0}, {"name": "brief", "weight": 0.25}]
    config = run_config(advanced={"algorithm": "gdpo", "rewards": rewards})
    run = running.submit(config, workspace="parts", name="gdpo")
    info = running.wait(run, "finished")
    batches = [e["data"] for e in running.events(run) if e["type"] == "rl.batch.assembled"]
    assert len(batches) == 4
    for group in (group for batch in batches for group in batch["groups"]):
        assert set(group["parts"]) == {"digits", "brief"}
        values = zip(*(group["parts"][reward["name"]] for reward in rewards), strict=True)
        for (digits, brief), reward in zip(values, group["rewards"], strict=True):
            assert reward == pytest.approx(digits + 0.25 * brief)
    assert any(point["value"] != 0 for point in info["metrics"]["train/grad_norm"])
    found = verify(running, run)
    assert found["status"] == "verified", found


TWO_TURNS = """
from headrace import AgentWorkflow, Grader


class Say(AgentWorkflow):
    async def run(self, ctx):
        said = list(ctx.prompt)
        for turn in range(2):
            reply = await ctx.chat(said, max_tokens=3)
            ctx.set_turn_reward(turn, float(len(reply["content"])))
            said += [reply, {"role": "user", "content": "more"}]
        if "fails" in ctx.metadata:
            ctx.set_turn_reward(2, 1.0)
        return said[:-1]


class Same(Grader):
    async def grade(self, ctx):
        for name in ctx.samples:
            ctx.set_sample_reward(name, 1.0)
"""


def test_rewards_of_turns_train_a_run_that_is_rebuilt_from_its_log(
    tmp_path: Path, running: Platform
) -> None:
    """All rewards of samples are equal, so a run that does not read those of turns learns nothing."""
    workspace = make_workspace(tmp_path / "workspace", {"rollouts/say/main.py": TWO_TURNS})
    made = running.post("/workspaces", {"url": str(workspace), "name": "turns"})
    assert made.status_code == 201, made.text
    moved = {}
    for name, advanced in {"with": {"turn_reward_coef": 0.5}, "without": {}}.items():
        run = running.submit(run_config(advanced=advanced), workspace="turns", name=f"turns-{name}")
        metrics = running.wait(run, "finished")["metrics"]
        assert all(point["value"] > 0 for point in metrics["rollout/turn_reward"])
        moved[name] = [point["value"] for point in metrics["train/grad_norm"]]
        found = verify(running, run)
        assert found["status"] == "verified", found
    assert any(moved["with"])
    assert not any(moved["without"])


TWO_AGENTS = """
from headrace import AgentWorkflow, Grader


class Team(AgentWorkflow):
    async def run(self, ctx):
        draft = await ctx.chat(ctx.prompt, max_tokens=3)
        ctx.set_turn_agent(0, "writer")
        review = await ctx.chat([{"role": "user", "content": draft["content"]}], max_tokens=3)
        ctx.set_turn_agent(1, "critic")
        ctx.set_agent_reward("critic", float(len(review["content"])))
        return [*ctx.prompt, draft]


class Same(Grader):
    async def grade(self, ctx):
        for name in ctx.samples:
            ctx.set_sample_reward(name, 1.0)
"""


def test_agents_of_a_workflow_train_by_their_own_rewards_and_are_rebuilt(
    tmp_path: Path, running: Platform
) -> None:
    """All rewards of samples are equal, so a run that does not compare agents learns nothing."""
    workspace = make_workspace(tmp_path / "workspace", {"rollouts/say/main.py": TWO_AGENTS})
    made = running.post("/workspaces", {"url": str(workspace), "name": "agents"})
    assert made.status_code == 201, made.text
    moved = {}
    for name, advanced in {"with": {"agent_advantages": True}, "without": {}}.items():
        run = running.submit(run_config(advanced=advanced), workspace="agents", name=f"team-{name}")
        metrics = running.wait(run, "finished")["metrics"]
        moved[name] = [point["value"] for point in metrics["train/grad_norm"]]
        found = verify(running, run)
        assert found["status"] == "verified", found
    assert any(moved["with"])
    assert not any(moved["without"])


def test_a_reward_for_a_turn_that_does_not_exist_fails_its_sample_with_the_reason(
    tmp_path: Path, running: Platform
) -> None:
    files = {"rollouts/say/main.py": TWO_TURNS.replace('"fails" in ctx.metadata', "True")}
    workspace = make_workspace(tmp_path / "workspace", files)
    made = running.post("/workspaces", {"url": str(workspace), "name": "wrong"})
    assert made.status_code == 201, made.text
    run = running.submit(run_config(advanced={"turn_reward_coef": 1.0}), workspace="wrong")
    info = running.wait(run, "failed")
    assert "a reward for turn 2, but 2 requests were answered" in info["run"]["error"]
