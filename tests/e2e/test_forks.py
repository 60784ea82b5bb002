"""A fork without a change ends in the bits of its parent, in every execution mode, from any step. It is
worth its seconds because only a whole run shows that nothing of the parent's state was lost."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from producers.core.submit import ForkOrigin, SubmitRequest
from schemas.events import (
    GroupGenerated,
    PolicyInitialized,
    PolicyUpdated,
    RunFailed,
    RunFinished,
    RunRequested,
    StepSettled,
)
from schemas.ids import policy_stream, run_stream
from schemas.models.fork import ForkPoint
from tests.kit.in_memory import InMemory, in_memory
from tests.kit.platform import ROWS, TINY, make_workspace, run_config

pytestmark = [pytest.mark.kills, pytest.mark.processes, pytest.mark.torch]

STEPS = 5
MODES: Mapping[str, Mapping[str, object]] = {
    "sync": {"execution_mode": "sync"},
    "one_step_off_async": {"execution_mode": "one_step_off_async", "state_interval": 3},
    "fully_async": {
        "execution_mode": "fully_async",
        "max_steps_off_policy": 2,
        "weight_sync_interval": 2,
        "curriculum": {"min_pass_rate": 0.4, "max_pass_rate": 0.6, "pass_reward": 0.1},
    },
}


def point_of(running: InMemory, run: str, step: int, *, replay: bool = False) -> ForkPoint:
    """Where a fork at a step begins, as the log says it."""
    settled = next(
        r
        for r in running.world.events
        if r.stream == run_stream(run) and isinstance(r.event, StepSettled) and r.event.step == step
    )
    assert isinstance(settled.event, StepSettled)
    made = next(
        r.version
        for r in running.world.events
        if r.stream == policy_stream(run)
        and isinstance(r.event, PolicyInitialized | PolicyUpdated)
        and r.event.state.step == settled.event.state.step
    )
    return ForkPoint(
        parent=run,
        step=step,
        position=settled.version,
        policy_position=made,
        replay_samples=replay,
    )


def parent_of(running: InMemory, run: str) -> RunRequested:
    return next(e for e in running.events_of(RunRequested) if e.run == run)


async def forked(running: InMemory, run: str, step: int, *, key: str, replay: bool = False) -> str:
    """Fork a run without a change, and return the id of the child once it has finished."""
    parent = parent_of(running, run)
    request = SubmitRequest(
        parent.config.model_dump(mode="json", exclude_defaults=True),
        workspace=parent.workspace,
        fork=ForkOrigin(parent, point_of(running, run, step, replay=replay)),
    )
    recorded = await running.submitter.submit_run(request, key=key)
    child = recorded.event.run_id
    while not any(e.run == child for e in running.events_of(RunFinished)):
        failed = [e.message for e in running.events_of(RunFailed)]
        assert not failed, failed
        await asyncio.sleep(0.02)
    return child


def hashes(running: InMemory, run: str) -> dict[int, tuple[str, str]]:
    """Step -> the hashes of its version."""
    return {
        e.step: (e.state.weights_sha256, e.state.state_sha256)
        for e in running.events_of(StepSettled)
        if e.run == run
    }


@pytest.mark.parametrize("mode", MODES)
async def test_a_fork_without_a_change_ends_in_the_parents_bits(tmp_path: Path, mode: str) -> None:
    workspace = make_workspace(tmp_path / "workspace")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROWS)
    config = run_config(advanced={"max_steps": STEPS, **MODES[mode]})
    async with in_memory(tmp_path / "home", latency_seed=3) as running:
        await running.upload("numbers", rows)
        await running.workspaces.add(str(workspace), "w")
        parent = await running.run_to_end(config, workspace="w", key="parent")
        expected = hashes(running, parent)
        for step in (0, 2, 3):
            child = await forked(running, parent, step, key=f"fork {step}")
            assert hashes(running, child) == {s: h for s, h in expected.items() if s >= step}
        again = await forked(running, child, 4, key="fork of a fork")
        assert hashes(running, again) == {s: h for s, h in expected.items() if s >= 4}
        replayed = await forked(running, parent, 1, key="replayed", replay=True)
        assert hashes(running, replayed) == {s: h for s, h in expected.items() if s >= 1}
        groups = [e for e in running.events_of(GroupGenerated) if e.spec.owner == replayed]
        taken = {e.spec.group_key.step for e in groups if e.replayed == parent}
        assert 2 in taken
        assert all(e.spec.template.policy.version <= 1 for e in groups if e.replayed)


async def test_a_fork_of_a_run_that_samples_nothing_ends_in_its_parents_bits(
    tmp_path: Path,
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROWS)
    config: dict[str, dict[str, Any]] = {
        "experiment": {"model_path": TINY, "dataset": "numbers"},
        "training": {"lr": 1e-2},
        "advanced": {"algorithm": "sft", "batch_size": 4, "max_steps": STEPS, "state_interval": 2},
    }
    async with in_memory(tmp_path / "home") as running:
        await running.upload("numbers", rows)
        parent = await running.run_to_end(config, workspace=None, key="parent")
        expected = hashes(running, parent)
        child = await forked(running, parent, 3, key="fork")
        assert hashes(running, child) == {s: h for s, h in expected.items() if s >= 3}
