"""kill -9 while a run trains on rows that share what they begin with: the weights are those of an
undisturbed run, and verify rebuilds them from its log."""

from tests.chaos.trials import verified
from tests.kit.forgetful_turns import FILES, TURNS, forgetful_run, tokens_of
from tests.kit.kills import Points, Stage
from tests.kit.ledger import check
from tests.kit.platform import final_adapter

STEPS = 4
POINTS: Points = {
    "rollout.perform.GenerateSample.effect_done": 5,
    "learn.perform.TrainStep.claimed": 2,
    "learn.perform.TrainStep.effect_done": 2,
}


def act(stage: Stage) -> str:
    """The hash of the last adapter."""
    with stage.platform(files=FILES) as running:
        config = forgetful_run(max_steps=STEPS, state_interval=2, micro_batch_tokens=1024)
        run = running.submit(config, workspace="w")
        info = running.wait(run, "finished", within_s=300)
        check(running.events(run), steps=STEPS, groups=2, samples=4)
        of_rows, computed = tokens_of(running, run)
        assert of_rows > 3 * computed, f"{TURNS} rows of a sample share what they begin with"
        assert max(point["value"] for point in info["metrics"]["train/sampler_mismatch"]) < 1e-5
        verified(running, run)
        return final_adapter(info)
