"""kill -9 while runs with pools and oversampling are decided: the pools, the rows of each step and the
weights are those of undisturbed runs, in the order of steps and ahead of them."""

from collections.abc import Mapping
from typing import Any

from tests.chaos.trials import verified
from tests.kit.kills import Stage
from tests.kit.ledger import check
from tests.kit.platform import final_adapter, run_config

STEPS = 8
TABLE = {
    "min_pass_rate": 0.3,
    "max_pass_rate": 0.7,
    "hard_fraction": 0.25,
    "pass_reward": 0.125,
    "oversampling_factor": 1.5,
}
GROUPS = 3
"""Of which two are trained."""

RUNS: Mapping[str, Mapping[str, object]] = {
    "sync": {},
    "fully_async": {"execution_mode": "fully_async", "max_steps_off_policy": 2},
}
POINTS = {
    "run.intake.decided": 6,
    "run.intake.tx_before_commit": 4,
    "run.intake.tx_after_commit": 3,
    "rollout.perform.GenerateSample.effect_done": 6,
    "grade.perform.GradeGroup.tx_after_commit": 2,
    "learn.perform.TrainStep.effect_done": 2,
}


def act(stage: Stage) -> dict[str, tuple[str, list[Any], list[Any]]]:
    """Two runs side by side. Returns the hash of the weights of each, its decisions about pools, and
    the rows that it requested."""
    found = {}
    with stage.platform() as running:
        started = {
            name: running.submit(
                run_config(advanced={**keys, "curriculum": TABLE, "max_steps": STEPS}),
                workspace="w",
            )
            for name, keys in RUNS.items()
        }
        for name, run in started.items():
            info = running.wait(run, "finished", within_s=300)
            events = running.events(run)
            check(events, steps=STEPS, groups=GROUPS, samples=4)
            decided = [e["data"] for e in events if e["type"] == "rl.pools.decided"]
            requested = [e["data"] for e in events if e["type"] == "rl.groups.requested"]
            assert [data["step"] for data in decided] == list(range(1, STEPS + 1))
            assert any(data["easy"] or data["hard"] for data in decided), "rows move"
            verified(running, run)
            pools = [{key: data[key] for key in data if key != "run"} for data in decided]
            rows = [[slot["row"] for slot in data["slots"]] for data in requested]
            found[name] = (final_adapter(info), pools, rows)
    assert found["sync"][0] != found["fully_async"][0]
    return found
