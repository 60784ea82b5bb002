"""kill -9 of a rollout server, of our side of it, and of the worker, while the server makes rollouts:
same bits, nothing lost, nothing twice. Rollouts are made again, and never attached to (decision 29)."""

import json

from tests.chaos.victims import kill_after_steps
from tests.kit.kills import Stage
from tests.kit.ledger import check
from tests.kit.platform import final_adapter, run_config
from tests.kit.rollout_server import SERVER

STEPS = 5
CONFIG = run_config(advanced={"max_steps": STEPS, "state_interval": 2})
ROWS = "".join(
    json.dumps({"user_prompt": "wait", "ground_truth": "e", "metadata": {"more": n}}) + "\n"
    for n in range(8)
)
PROGRAM, HOST = "rollouts/say/main.py", "headrace/user_code/user_code_host.py server"
KILLS = {1: PROGRAM, 2: HOST, 3: "worker", 4: PROGRAM}
"""What dies after which step. The rollouts of the next step are being made."""


def act(stage: Stage) -> None:
    with stage.platform(files={"rollouts/say/main.py": SERVER}, rows=ROWS) as started:
        calm = started.wait(started.submit(CONFIG, workspace="w"), "finished", within_s=200)
        run = started.submit(CONFIG, workspace="w")
        kill_after_steps(started, run, KILLS)
        info = started.wait(run, "finished", within_s=200)
        events = started.events(run)
    assert final_adapter(info) == final_adapter(calm)
    check(events, steps=STEPS, groups=2, samples=4)
    entries = [entry for event in events for entry in event["data"].get("entries", ())]
    assert len(entries) >= STEPS * 8
    assert not [entry for entry in entries if entry["failure"]], "no sample fails because of a kill"
