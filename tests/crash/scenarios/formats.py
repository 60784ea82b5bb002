"""kill -9 while a run samples forced formats and calls and trains on them: the weights are those of an
undisturbed run, and verify finds the same token masks in its log."""

from tests.chaos.trials import verified
from tests.kit.forced_answers import FILES, forced_run
from tests.kit.kills import Points, Stage
from tests.kit.ledger import check
from tests.kit.platform import final_adapter

STEPS = 4
POINTS: Points = {
    "rollout.perform.GenerateSample.effect_done": 5,
    "rollout.perform.GenerateSample.claimed": 7,
    "learn.perform.TrainStep.claimed": 2,
    "learn.perform.TrainStep.effect_done": 2,
}


def act(stage: Stage) -> str:
    """The hash of the last adapter."""
    with stage.platform(files=FILES) as running:
        run = running.submit(forced_run(max_steps=STEPS, state_interval=2), workspace="w")
        info = running.wait(run, "finished", within_s=300)
        check(running.events(run), steps=STEPS, groups=2, samples=4)
        points = info["metrics"]["train/sampler_mismatch"]
        assert max(point["value"] for point in points) < 1e-5
        assert any(point["value"] > 0 for point in info["metrics"]["train/grad_norm"])
        verified(running, run)
        return final_adapter(info)
