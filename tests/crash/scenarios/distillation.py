"""A run that distils a checkpoint, one step ahead, while its learner and its sampler are killed. It ends
in the weights of a run that nobody disturbs, and its log rebuilds them."""

from tests.chaos.trials import verified
from tests.kit.kills import Points, Stage
from tests.kit.ledger import check
from tests.kit.platform import final_adapter, run_config

STEPS = 7
POINTS: Points = {
    "rollout.perform.GenerateSample.effect_done": 12,
    "grade.perform.GradeGroup.effect_done": 3,
    "learn.perform.InitializePolicy.effect_done": 2,
    "learn.perform.TrainStep.claimed": 2,
    "learn.perform.TrainStep.effect_done": 2,
}
"""Hits count from the start of a process, so each is small. The run that makes the teacher comes first,
with one step of two groups, so these points are in the other one."""


def act(stage: Stage) -> str:
    """The hash of the last adapter."""
    with stage.platform() as running:
        taught = run_config(advanced={"max_steps": 1})
        running.wait(running.submit(taught, workspace="w", name="teacher"), "finished")
        config = run_config(
            advanced={
                "algorithm": "distill",
                "execution_mode": "one_step_off_async",
                "teacher": "teacher@last",
                "teacher_hint": "Say {ground_truth}.",
                "distill_beta": 0.5,
                "max_steps": STEPS,
                "state_interval": 2,
                "seed": 8,
            }
        )
        run = running.submit(config, workspace="w")
        info = running.wait(run, "finished", within_s=300)
        check(running.events(run), steps=STEPS, groups=2, samples=4)
        verified(running, run)
        assert min(point["value"] for point in info["metrics"]["train/loss"]) > 0
        return final_adapter(info)
