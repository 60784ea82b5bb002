"""Asynchronous runs on two processes, one that samples and one that learns, with kill -9 in both: the
bits are those of an undisturbed run on one process, and the log says how to rebuild them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.chaos.trials import verified
from tests.kit.kills import Points, Stage, check_fired
from tests.kit.ledger import check
from tests.kit.platform import Platform, final_adapter, run_config

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

STEPS = 6
MODES: Mapping[str, Mapping[str, object]] = {
    "one_step_off_async": {},
    "fully_async": {
        "max_steps_off_policy": 3,
        "weight_sync_interval": 2,
        "minibatch_size": 4,
        "correction": "truncated",
        "entropy_target": 9.0,
    },
}
POINTS: Points = {
    "run.intake.tx_before_commit": 9,
    "rollout.perform.GenerateSample.effect_done": 9,
    "learn.perform.TrainStep.claimed": 3,
    "learn.perform.TrainStep.effect_done": 2,
}


def submitted(running: Platform, mode: str) -> str:
    advanced = {"max_steps": STEPS, "state_interval": 2, "execution_mode": mode, **MODES[mode]}
    return running.submit(run_config(advanced=advanced), workspace="w")


def test_kills_of_sampler_and_learner_change_nothing(tmp_path: Path) -> None:
    """A run of each mode, side by side."""
    with Stage(tmp_path / "calm", {}).platform() as running:
        calm = {mode: submitted(running, mode) for mode in MODES}
        expected = {m: final_adapter(running.wait(run, "finished")) for m, run in calm.items()}
    with Stage(tmp_path / "killed", POINTS).platform({"HEADRACE_WORKERS": "two"}) as running:
        killed = {mode: submitted(running, mode) for mode in MODES}
        for mode, run in killed.items():
            info = running.wait(run, "finished", within_s=200)
            check(running.events(run), steps=STEPS, groups=2, samples=4)
            assert final_adapter(info) == expected[mode], mode
            verified(running, run)
    check_fired(running.home, POINTS)
