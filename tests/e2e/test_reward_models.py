"""A reward model is trained on the platform, and then pays a run there."""

import json
import random
import string
from collections.abc import Iterator
from typing import Any

import pytest

from tests.crash.scenarios.reward_model import TRAINED
from tests.kit.platform import Platform, make_workspace, platform, run_config, verify

pytestmark = [
    pytest.mark.kills,
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.postgres,
    pytest.mark.slow,
]

PLAIN = """
from headrace import AgentWorkflow


class Say(AgentWorkflow):
    async def run(self, ctx):
        return [*ctx.prompt, await ctx.chat(ctx.prompt)]
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    root = tmp_path_factory.mktemp("reward-models")
    files = {
        "rollouts/plain/main.py": PLAIN,
        "rollouts/plain/pyproject.toml": '[project]\nname = "plain"\nversion = "0"\n',
    }
    workspace = make_workspace(root / "workspace", files)
    with platform(root / "home") as started:
        assert started.post("/workspaces", {"url": str(workspace), "name": "w"}).status_code == 201
        started.upload("numbers")
        started.upload("pairs", digits_before_letters(96))
        config = {**TRAINED, "advanced": {**TRAINED["advanced"], "max_steps": 36}}
        started.wait(started.submit(config, name="digits"), "finished")
        yield started


def digits_before_letters(num_pairs: int) -> str:
    """JSON Lines of pairs whose better answer has more digits than the other."""
    draw = random.Random(0)

    def text(digits: int) -> str:
        letters = "".join(draw.choices(string.ascii_letters + " .,:;", k=8 - digits))
        both = [*letters, *draw.choices(string.digits, k=digits)]
        draw.shuffle(both)
        return "a" + "".join(both)

    rows = [
        {"prompt": f"Say {n % 8}", "chosen": text(draw.randint(4, 8)), "rejected": text(n % 3)}
        for n in range(num_pairs)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def paid(rollout: str = "plain", **advanced: Any) -> dict[str, Any]:
    models = [{"model": "digits@last", "name": "digits", "weight": 2.0}]
    return run_config(
        experiment={"rollout": rollout},
        training={
            "lr": 2e-2,
            "n_samples_per_prompt": 8,
            "rollout_batch_size": 4,
            "max_response_length": 8,
        },
        advanced={"reward_models": models, **advanced},
    )


def test_a_policy_learns_what_a_reward_model_pays_for(running: Platform) -> None:
    """No user code grades, and the reward is the weighted score."""
    run = running.submit(paid(max_steps=20, tuning="full"), workspace="w", name="paid")
    info = running.wait(run, "finished", within_s=300)
    scores = [point["value"] for point in info["metrics"]["reward/digits"]]
    rewards = [point["value"] for point in info["metrics"]["rollout/raw_reward"]]
    assert rewards == pytest.approx([2 * score for score in scores])
    assert sum(scores[-4:]) / 4 > sum(scores[:4]) / 4 + 0.3, scores
    assert verify(running, run)["status"] == "verified"
    assert_refused(running, "paid@last", "is not a reward model but a policy of grpo")
    gone = running.api.delete("/runs/digits")
    assert gone.status_code == 409
    assert "need its checkpoints: paid" in gone.text


def assert_refused(running: Platform, name: str, says: str) -> None:
    """Assert that a run is refused that names this checkpoint as a reward model, and why."""
    models = [{"model": name}]
    answer = running.post("/runs", {"config": paid(reward_models=models), "workspace": "w"})
    assert answer.status_code == 400
    (issue,) = answer.json()["issues"]
    assert issue["key"] == "advanced.reward_models[0].model"
    assert says in issue["message"]


def test_a_score_is_added_to_the_grader_of_a_rollout(running: Platform) -> None:
    run = running.submit(paid("say", max_steps=2), workspace="w", name="both")
    running.wait(run, "finished")
    graded = [e for e in running.events(run) if e["type"] == "rl.group.graded"]
    grades = [grade for event in graded for grade in event["data"]["grades"]]
    assert grades
    eighths = [8 * (grade["reward"] - 2 * grade["parts"]["digits"]) for grade in grades]
    assert all(number == pytest.approx(round(number), abs=1e-6) for number in eighths), "digits / 8"
    assert len({round(number) for number in eighths}) > 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none@last", "none"),
        ("digits@3", "has no checkpoint 3"),
    ],
)
def test_another_checkpoint_is_refused_at_submit(running: Platform, name: str, says: str) -> None:
    assert_refused(running, name, says)


def test_a_reward_model_is_refused_as_a_policy(running: Platform) -> None:
    config = run_config(experiment={"model_path": "digits@last"})
    answer = running.post("/runs", {"config": config, "workspace": "w"})
    assert answer.status_code == 400
    assert "digits@36 is a reward model" in answer.json()["issues"][0]["message"]
    deployed = running.post("/deployments", {"checkpoint": "digits@last", "name": "digits"})
    assert deployed.status_code == 400
    assert "is a reward model" in deployed.text
