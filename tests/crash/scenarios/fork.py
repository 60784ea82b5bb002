"""kill -9 while runs are forked at random events, in all modes: without a change each fork ends in the
bits of its parent, whether its samples are generated again or recorded ones are used."""

import random
from collections.abc import Mapping

from tests.chaos.trials import verified
from tests.kit.kills import Stage
from tests.kit.platform import final_adapter, run_config

STEPS = 5
MODES: Mapping[str, Mapping[str, object]] = {
    "sync": {},
    "one_step_off_async": {},
    "fully_async": {"max_steps_off_policy": 2, "weight_sync_interval": 2},
}
POINTS = {
    "learn.perform.InitializePolicy.effect_done": 4,
    "learn.perform.TrainStep.effect_done": 17,
    "run.intake.tx_before_commit": 40,
    "rollout.perform.ReplayGroup.claimed": 1,
    "rollout.perform.ReplayGroup.effect_done": 2,
    "rollout.perform.ReplayGroup.tx_before_commit": 3,
    "rollout.perform.ReplayGroup.tx_after_commit": 3,
    "submit.before_commit": 5,
    "submit.after_commit": 8,
}
FORKS = 3
"""At so many random events of each parent; every other fork uses recorded samples."""


def act(stage: Stage) -> None:
    draw = random.Random(28)
    with stage.platform() as running:
        parents = {}
        for mode, keys in MODES.items():
            advanced = {"max_steps": STEPS, "state_interval": 3, "execution_mode": mode, **keys}
            parents[mode] = running.submit(run_config(advanced=advanced), workspace="w")
        found = {m: final_adapter(running.wait(run, "finished")) for m, run in parents.items()}
        forks = []
        for mode, parent in parents.items():
            events = running.events(parent)
            settled = [e for e in events if e["type"] == "rl.step.settled"]
            known = [
                e for e in events if settled[0]["cursor"] < e["cursor"] < settled[-1]["cursor"]
            ]
            for number, event in enumerate(draw.sample(known, FORKS)):
                body = {"at": event["id"], "replay_samples": number % 2 == 0}
                answer = running.post(f"/runs/{parent}/fork", body)
                assert answer.status_code == 201, answer.text
                forks.append((mode, answer.json()["run"]["id"], answer.json()["fork"]))
        for mode, fork, told in forks:
            info = running.wait(fork, "finished", within_s=300)
            assert final_adapter(info) == found[mode], (mode, told)
        verified(running, forks[-1][1])
