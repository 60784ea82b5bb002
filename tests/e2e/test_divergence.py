"""Runs that diverge: the loss stops being a number, or a repeated step gives other bits."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from producers.core.submit import SubmitRequest
from schemas.events import CheckpointSaved, RunFailed, RunRequested, StepSettled, StepSkipped
from tests.kit.in_memory import in_memory
from tests.kit.platform import (
    ROWS,
    Platform,
    eventually,
    make_workspace,
    platform,
    run_config,
    verify,
)
from trainer import grpo
from trainer.algorithms.registry import OBJECTIVES
from trainer.objective.objective import by_group

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch]

GOOD_STEPS, GROUPS = 2, 2


class Diverging:
    """Advantages as they should be for two steps, and then none that is a number."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, rewards: Sequence[float | None]) -> list[float]:
        self.calls += 1
        healthy = self.calls <= GOOD_STEPS * GROUPS
        return grpo.advantages(rewards) if healthy else [float("nan")] * len(rewards)


def test_three_steps_without_a_number_end_the_run_and_name_its_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBJECTIVES, "grpo", replace(grpo.OBJECTIVE, estimate=by_group(Diverging())))
    workspace = make_workspace(tmp_path / "workspace")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROWS)
    config = run_config(
        training={"rollout_batch_size": GROUPS},
        advanced={"max_steps": 8},
        checkpoints={"checkpoint_save_freq": 2},
    )

    async def told() -> None:
        async with in_memory(tmp_path / "home") as started, asyncio.timeout(360):
            await started.workspaces.add(str(workspace), "w")
            await started.upload("numbers", rows)
            asked = await started.submitter.submit_run(
                SubmitRequest(config, workspace="w"), key="k"
            )
            assert isinstance(asked.event, RunRequested)
            while not started.events_of(RunFailed):
                await asyncio.sleep(0.02)
            [failed] = started.events_of(RunFailed)
            assert f"last good checkpoint: {asked.event.run}@4" in failed.message
            assert "3 to 5" in failed.message
            assert "training.lr" in failed.message
            skipped = started.events_of(StepSkipped)
            assert [event.step for event in skipped] == [3, 4, 5]
            assert all(event.batch is not None for event in skipped)
            states = [event.state.weights_sha256 for event in started.events_of(StepSettled)]
            assert len(set(states[:3])) == 3
            assert set(states[2:]) == {states[2]}
            saved = {
                event.spec.step: event.spec.state for event in started.events_of(CheckpointSaved)
            }
            assert saved[4].weights_sha256 == saved[2].weights_sha256 == states[2]

    asyncio.run(told())


NO_COMPILER = {"CC": "/bin/false"}
"""Without a C compiler, steps have other bits than with one."""


def start_and_pause(started: Platform, *, allowed: bool) -> str:
    """A run that is paused after some steps, of which only version 0 is stored whole."""
    config = run_config(
        checkpoints={"checkpoint_save_freq": 100},
        advanced={
            "max_steps": 40,
            "state_interval": 100,
            "deterministic": False,
            "allow_divergence": allowed,
        },
    )
    run = started.submit(config, workspace="w")
    eventually(
        lambda: (started.info(run)["run"]["current_step"] or 0) >= 2 or None,
        within_s=120,
        what="two steps",
    )
    assert started.post(f"/runs/{run}/pause", {}).status_code < 300
    eventually(
        lambda: started.info(run)["run"]["phase"] == "paused" or None,
        within_s=60,
        what="the run is paused",
    )
    return run


@pytest.mark.postgres
def test_on_another_machine_a_run_goes_on_as_a_fork_only_if_it_may(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "workspace")
    with platform(tmp_path / "home") as started:
        started.post("/workspaces", {"url": str(workspace), "name": "w"})
        started.upload("numbers")
        refused, forked = (start_and_pause(started, allowed=one) for one in (False, True))
    with platform(tmp_path / "home", environment=NO_COMPILER) as started:
        for run in (refused, forked):
            assert started.post(f"/runs/{run}/resume", {}).status_code < 300
        failed = started.wait(refused, "failed", within_s=120)
        assert "replay_diverged" in failed["run"]["error"]
        assert "--allow-divergence" in failed["run"]["error"]
        info = started.wait(forked, "finished", within_s=240)
        assert info["run"]["current_step"] == 40
        warned = [e for e in started.events(forked) if e["type"] == "rl.run.warned"]
        [text] = [e["data"]["message"] for e in warned if "diverge" in e["data"]["message"]]
        step = int(text.split()[2])
        assert 3 <= step < 40
        found = verify(started, forked)
        assert (found["status"], found["findings"]) == ("verified", [])
        assert found["forks"] == [step]
        assert found["steps"] == 40 - step, "all steps after the fork are rebuilt"

        updates = [e["data"] for e in started.events(forked) if e["type"] == "rl.policy.updated"]
        state = next(data["state"] for data in updates if data["step"] == step)
        path = Path(urlsplit(state["weights"]["uri"]).path)
        path.write_bytes(b"x" + path.read_bytes()[1:])
        found = verify(started, forked)
        assert (found["status"], found["error"]) == ("differs", None)
        assert [finding["what"] for finding in found["findings"]] == [path.as_uri()]
