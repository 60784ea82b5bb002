"""Runs of DPO and of a reward model, which sample nothing, while their learner is killed. They end in
the weights and the held-out accuracies of runs that nobody disturbs, and their logs rebuild them."""

from typing import Any

from tests.chaos.trials import verified
from tests.kit.kills import Points, Stage
from tests.kit.platform import TINY, final_adapter
from tests.kit.preference_rows import pairs, pairs_with_margins

POINTS: Points = {
    "run.intake.tx_before_commit": 2,
    "learn.perform.InitializePolicy.effect_done": 1,
    "learn.perform.TrainStep.claimed": 2,
    "learn.perform.TrainStep.effect_done": 2,
    "learn.perform.TrainStep.tx_before_commit": 1,
}
"""Hits count from the start of a process, so each is small."""

CONFIG: dict[str, Any] = {
    "experiment": {"model_path": TINY, "dataset": "pairs"},
    "training": {"lr": 1e-3},
    "checkpoints": {"checkpoint_save_freq": 3, "eval_interval": 2},
    "advanced": {
        "algorithm": "dpo",
        "validation_dataset": "held-out",
        "batch_size": 4,
        "max_steps": 6,
        "state_interval": 2,
        "deterministic": True,
    },
}


REWARD_MODEL = {"algorithm": "reward_model", "center_rewards_coefficient": 0.01}


def act(stage: Stage, **advanced: Any) -> tuple[str, list[float]]:
    """The hash of the last adapter, and the accuracies that were measured."""
    config = {**CONFIG, "advanced": {**CONFIG["advanced"], **advanced}}
    with stage.platform() as running:
        running.upload("pairs", pairs_with_margins(range(10, 26)))
        running.upload("held-out", pairs(range(30, 38)))
        run = running.submit(config)
        info = running.wait(run, "finished")
        verified(running, run)
        measured = [point["value"] for point in info["metrics"]["eval/validation/accuracy"]]
        return final_adapter(info), measured


def act_reward_model(stage: Stage) -> tuple[str, list[float]]:
    """The same of a reward model, whose head is trained beside its adapter."""
    return act(stage, **REWARD_MODEL)
