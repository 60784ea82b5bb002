"""Programs of `osmosis-ai` and environments of `verifiers` train: two steps of GRPO with a tool call, on
a model that a short supervised run has taught to call the tool.

They run in the sandbox, with the packages that the `pyproject.toml` of their rollout names.
"""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from schemas.events import PolicyUpdated
from tests.agents import rollout_programs as programs
from tests.agents.newer_python import served_project
from tests.agents.test_training import (
    ASK,
    GROUPS,
    SAMPLES,
    STEPS,
    Trained,
    demonstrations,
    of,
    records_of,
    sampled_turns,
    spans_of,
    supervised,
)
from tests.kit.in_memory import in_memory
from tests.kit.platform import make_workspace

pytestmark = [
    pytest.mark.agents,
    pytest.mark.kills,
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.asyncio(loop_scope="module"),
]

KINDS = {
    "osmosis": "osmosis",
    "older": "older_osmosis",
    "v1": "verifiers",
    "v0": "older_verifiers",
}
CHANGES = {
    "multiply": "add",
    "a * b": "a + b",
    "a: float, b: float": "a: int, b: int",
    "-> float:\n    ": "-> int:\n    ",
    'f"{a} * 7?", answer=7.0 * a': 'f"{a}+2", answer=a + 2.0',
    "range(6, 10)": "range(1, 5)",
    "#### *(-?[0-9.]+)": "(-?[0-9.]+)",
}
"""What makes the programs, which multiply, add. The model learned that."""

MAINS = {
    "osmosis_strands": programs.STRANDS,
    "osmosis_agents": programs.OPENAI_AGENTS,
    "older_strands": programs.OLDER_STRANDS,
    "older_agents": programs.OLDER_OPENAI_AGENTS,
    "v1_taskset": programs.VERIFIERS_V1,
    "v0_environment": programs.VERIFIERS_V0,
}


def changed(main: str) -> str:
    """The program, as one that adds."""
    for old, new in CHANGES.items():
        main = main.replace(old, new)
    return main


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Trained]:
    root = tmp_path_factory.mktemp("served")
    sft, rl = root / "sft.jsonl", root / "rl.jsonl"
    sft.write_text("".join(demonstrations()))
    task = json.dumps({"prompt": ASK, "answer": 3.0})
    row = {"user_prompt": ASK, "ground_truth": "3"}
    rl.write_text((json.dumps(row) + "\n") * 4)
    tasks = root / "tasks.jsonl"
    tasks.write_text((json.dumps({**row, "metadata": {"task": task}}) + "\n") * 4)
    numbered = root / "numbered.jsonl"
    numbered.write_text((json.dumps({**row, "metadata": {"task": 0}}) + "\n") * 4)
    files = {
        f"rollouts/{name.partition('_')[0]}/{name}.py": changed(main)
        for name, main in MAINS.items()
    }
    files |= {f"rollouts/{kind}/pyproject.toml": served_project(KINDS[kind]) for kind in KINDS}
    workspace = make_workspace(root / "workspace", files)
    with sampled_turns() as turns:
        async with in_memory(root / "home") as platform:
            for name, file in (
                ("demonstrations", sft),
                ("questions", rl),
                ("tasks", tasks),
                ("numbered", numbered),
            ):
                await platform.upload(name, file)
            await platform.workspaces.add(str(workspace), name="w")
            model = await platform.run_to_end(supervised(), workspace=None, key="sft")
            yield Trained(platform, f"{model}@last", turns)


@pytest.mark.parametrize("name", MAINS)
async def test_a_program_trains_two_steps_on_what_was_sampled(name: str, trained: Trained) -> None:
    platform, kind = trained.platform, name.partition("_")[0]
    trained.turns.clear()
    config = of(name, trained.model)
    config["experiment"]["rollout"] = kind
    config["experiment"]["dataset"] = {"v1": "tasks", "v0": "numbered"}.get(kind, "questions")
    config["training"] |= {"agent_workflow_timeout_s": 300, "max_prompt_length": 900}
    run = await platform.run_to_end(config, workspace="w", key=name)
    records = await records_of(platform, run)
    assert len(records) == STEPS * GROUPS * SAMPLES
    kept = [(key, record) for key, record in records if record.failure is None]
    failed = [record.failure for _, record in records if record.failure]
    assert len(failed) <= len(records) // 4, failed
    assert any(m.role == "tool" and float(m.content) == 3 for _, r in kept for m in r.messages)
    assert all(record.grade is not None for _, record in kept)
    for key, record in kept:
        turns = trained.turns_of(key)
        assert record.num_turns == len(turns)
        sampled = sorted((turn.completion_ids, turn.logprobs) for turn in turns)
        assert sorted(spans_of(record)) == sampled
    updates = [e for e in platform.events_of(PolicyUpdated) if e.run == run and e.step > 0]
    assert [event.step for event in updates] == [1, 2]
    for event in updates:
        assert event.metrics["train/sampler_mismatch"] <= 1e-6
