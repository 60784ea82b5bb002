"""A run whose rollout is a program that speaks the rollout protocol: the server makes and grades the
samples, and two steps of GRPO are trained on exactly what its policy sampled."""

import asyncio
import json
from pathlib import Path

import pytest

from schemas.events import GroupGenerated, GroupGraded, PolicyUpdated, WorkspaceSynced
from schemas.sampling import SampleBatch
from tests.kit.in_memory import in_memory
from tests.kit.platform import make_workspace, run_config
from tests.kit.rollout_server import SERVER

pytestmark = [pytest.mark.processes, pytest.mark.torch]

STEPS, GROUPS = 2, 2
ROWS = "\n".join(
    json.dumps({"user_prompt": f"say {n}", "ground_truth": "e", "metadata": {"more": n}})
    for n in range(4)
)


def test_a_rollout_server_trains(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "workspace", {"rollouts/say/main.py": SERVER})
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROWS)
    config = run_config(training={"rollout_batch_size": GROUPS}, advanced={"max_steps": STEPS})

    async def trained() -> None:
        async with in_memory(tmp_path / "home") as started, asyncio.timeout(360):
            await started.workspaces.add(str(workspace), "w")
            await started.upload("numbers", rows)
            await started.run_to_end(config, workspace="w")
            synced = started.events_of(WorkspaceSynced)
            assert {rollout.kind for event in synced for rollout in event.rollouts} == {"server"}
            assert len(started.events_of(PolicyUpdated)) == STEPS
            generated = started.events_of(GroupGenerated)
            graded = {group.spec.group: group for group in started.events_of(GroupGraded)}
            assert len(generated) == STEPS * GROUPS
            for group in generated:
                batch = SampleBatch.model_validate_json(
                    await started.artifacts.get_artifact(graded[group.spec.group].artifact)
                )
                for record, grade in zip(
                    batch.samples, graded[group.spec.group].grades, strict=True
                ):
                    assert record.failure is None, record.failure
                    assert record.grade is not None
                    assert grade.reward == record.grade.reward
                    said = float("e" in record.text) + float(record.messages[0].content[-1])
                    assert grade.reward == said
                    assert (record.num_turns, len(record.sequences)) == (1, 1)
                    assert sum(record.sequences[0].loss_mask) == record.completion_tokens > 0

    asyncio.run(trained())
