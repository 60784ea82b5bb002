"""kill -9 while adapters of each kind, Muon and online DPO train: the weights are those of undisturbed
runs."""

from collections.abc import Mapping

from tests.chaos.trials import verified
from tests.kit.kills import Stage
from tests.kit.ledger import check
from tests.kit.platform import final_adapter, run_config

STEPS = 4
RUNS: Mapping[str, Mapping[str, object]] = {
    "rslora": {"lora_scaling": "rank_stabilized"},
    "dora": {"lora_variant": "dora"},
    "muon": {"optimizer": "muon", "updates_per_step": 2},
    "muon, full": {"optimizer": "muon", "tuning": "full"},
    "online_dpo": {"algorithm": "online_dpo"},
}
POINTS = {
    "rollout.perform.GenerateSample.effect_done": 12,
    "learn.perform.TrainStep.claimed": 5,
    "learn.perform.TrainStep.effect_done": 4,
    "ckpt.before_manifest": 2,
}


def act(stage: Stage) -> dict[str, str]:
    """Runs of each kind, side by side. Returns the hash of the weights of each."""
    found = {}
    with stage.platform() as running:
        started = {
            name: running.submit(
                run_config(advanced={**keys, "max_steps": STEPS, "state_interval": 2}),
                workspace="w",
            )
            for name, keys in RUNS.items()
        }
        for name, run in started.items():
            info = running.wait(run, "finished", within_s=300)
            check(running.events(run), steps=STEPS, groups=2, samples=4)
            if "updates_per_step" not in RUNS[name]:  # a second update is off-policy
                points = info["metrics"]["train/sampler_mismatch"]
                assert max(point["value"] for point in points) < 1e-5, name
            verified(running, run)
            found[name] = final_adapter(info)
    assert len(set(found.values())) == len(RUNS)
    return found
