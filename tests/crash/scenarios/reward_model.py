"""A run that a reward model pays, while its worker is killed: the scores are recorded once, and the
weights are those of an undisturbed run."""

from typing import Any

from tests.chaos.trials import verified
from tests.kit.kills import Points, Stage
from tests.kit.ledger import check
from tests.kit.platform import TINY, final_adapter, run_config
from tests.kit.preference_rows import pairs

STEPS = 4
POINTS: Points = {
    "rollout.perform.GenerateSample.effect_done": 12,
    "rollout.perform.GenerateSample.tx_before_commit": 5,
    "grade.perform.GradeGroup.effect_done": 2,
    "learn.perform.TrainStep.effect_done": 3,
}

TRAINED: dict[str, Any] = {
    "experiment": {"model_path": TINY, "dataset": "pairs"},
    "training": {"lr": 3e-3},
    "advanced": {
        "algorithm": "reward_model",
        "batch_size": 8,
        "max_steps": 6,
        "deterministic": True,
    },
}


def act(stage: Stage) -> tuple[str, str, list[float]]:
    """The hashes of the reward model and of the policy, and the mean score of each step."""
    with stage.platform() as running:
        running.upload("pairs", pairs(range(10, 42)))
        judge = running.wait(running.submit(TRAINED, name="short"), "finished")
        paid = run_config(
            advanced={
                "max_steps": STEPS,
                "state_interval": 2,
                "reward_models": [{"model": "short@last", "weight": 0.5, "name": "brevity"}],
            }
        )
        run = running.submit(paid, workspace="w")
        info = running.wait(run, "finished", within_s=300)
        check(running.events(run), steps=STEPS, groups=2, samples=4)
        verified(running, run)
        scores = [point["value"] for point in info["metrics"]["reward/brevity"]]
        assert len(scores) == STEPS
        return final_adapter(judge), final_adapter(info), scores
