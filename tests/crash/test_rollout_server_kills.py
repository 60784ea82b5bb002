"""kill -9 of a rollout server, of our side of it, and of the worker, while the server makes rollouts:
same bits, nothing lost, nothing twice. Rollouts are made again, and never attached to (decision 29)."""

import json
import time
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.victims import killed, pids, user_pids
from tests.kit.ledger import check
from tests.kit.platform import (
    Platform,
    eventually,
    final_adapter,
    make_workspace,
    platform,
    run_config,
)
from tests.kit.rollout_server import SERVER

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

STEPS = 5
CONFIG = run_config(advanced={"max_steps": STEPS, "state_interval": 2})
ROWS = "".join(
    json.dumps({"user_prompt": "wait", "ground_truth": "e", "metadata": {"more": n}}) + "\n"
    for n in range(8)
)
PROGRAM, HOST = "rollouts/say/main.py", "headrace/user_code/user_code_host.py server"
KILLS = {1: PROGRAM, 2: HOST, 3: "worker", 4: PROGRAM}
"""What dies after which step. The rollouts of the next step are being made."""


def victims(started: Platform, target: str) -> list[int] | None:
    """For `eventually`: the processes that `target` names now."""
    return (pids(started, target) if target == "worker" else user_pids(started, target)) or None


def reached(started: Platform, run: str, step: int) -> bool | None:
    """For `eventually`: whether a run has made this step."""
    return (started.info(run)["run"]["current_step"] or 0) >= step or None


def test_kills_while_a_rollout_server_works_change_nothing(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "workspace", {"rollouts/say/main.py": SERVER})
    with platform(tmp_path / "home") as started:
        started.post("/workspaces", {"url": str(workspace), "name": "w"}, key="workspace")
        started.upload("numbers", ROWS)
        calm = started.wait(started.submit(CONFIG, workspace="w"), "finished", within_s=200)
        run = started.submit(CONFIG, workspace="w")
        died = []
        for step, target in KILLS.items():
            eventually(partial(reached, started, run, step), within_s=120, what=f"step {step}")
            time.sleep(0.2)
            found = eventually(partial(victims, started, target), within_s=60, what=target)
            died.append(killed(found[0], target))
        info = started.wait(run, "finished", within_s=200)
        events = started.events(run)
    assert len([each for each in died if each]) == len(KILLS), died
    assert final_adapter(info) == final_adapter(calm)
    check(events, steps=STEPS, groups=2, samples=4)
    entries = [entry for event in events for entry in event["data"].get("entries", ())]
    assert len(entries) >= STEPS * 8
    assert not [entry for entry in entries if entry["failure"]], "a kill is no fault of a sample"
