"""The unmodified clients and frameworks train: two steps of GRPO with a tool call, on a model that a
short supervised run has taught to call the tool. What is trained is what was sampled, token for token.

Everything is the product: the packages are those of the rollout's `pyproject.toml`, and the clients run
in the sandbox.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio

from schemas.events import PolicyUpdated, SampleGenerated
from schemas.sampling import (
    DrawKey,
    SampleBatch,
    SampleRecord,
    SampleRequest,
    Tell,
    Turn,
)
from tests.agents.client_process import CLIENTS, NAMES, PACKAGES
from tests.agents.newer_python import project_of
from tests.kit.in_memory import InMemory, in_memory
from tests.kit.platform import make_workspace, run_config
from trainer.sampler.engine import TorchSampler

pytestmark = [
    pytest.mark.agents,
    pytest.mark.kills,
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.asyncio(loop_scope="module"),
]

STEPS, GROUPS, SAMPLES = 2, 2, 4
ASK = "1+2"
CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a":1,"b":2}'},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
    },
}


def demonstrations() -> Iterator[str]:
    """What the supervised run learns: to call the tool and to say its result, whether or not there is a
    system prompt (two of the frameworks send one)."""
    for number in range(64):
        system = [{"role": "system", "content": "Be brief."}] * (number % 2)
        talk = [
            *system,
            {"role": "user", "content": ASK},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
            {"role": "assistant", "content": "3"},
        ]
        yield json.dumps({"messages": talk, "tools": [TOOL]}) + "\n"


WORKFLOW = """
from headrace import AgentWorkflow, Grader
from {name} import run


class Client(AgentWorkflow):
    async def run(self, ctx):
        await run(ctx.base_url, ctx.api_key, ctx.prompt[-1]["content"])


class Correct(Grader):
    \"\"\"An answer is right when it is the label. A call earns a little, so that rewards differ.\"\"\"

    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            ctx.set_sample_reward(name, (sample.text == ctx.label) + 0.01 * len(sample.text))
"""


def client_files() -> dict[str, str]:
    """The rollout of the clients, with an entry point for each."""
    files = {f"{name}.py": (CLIENTS / f"{name}.py").read_text() for name in NAMES}
    files |= {f"train_{name}.py": WORKFLOW.format(name=name) for name in NAMES}
    files["pyproject.toml"] = project_of(PACKAGES)
    return {f"rollouts/clients/{path}": text for path, text in files.items()}


@contextmanager
def sampled_turns() -> Iterator[list[tuple[DrawKey, Turn]]]:
    """The turns that the engine samples meanwhile, as a whole or as a stream, with their keys."""
    turns: list[tuple[DrawKey, Turn]] = []
    sample, stream = TorchSampler.sample, TorchSampler.stream

    async def recorded(self: TorchSampler, request: SampleRequest) -> Turn:
        turns.append((request.key, turn := await sample(self, request)))
        return turn

    async def recorded_stream(self: TorchSampler, request: SampleRequest, tell: Tell) -> Turn:
        turns.append((request.key, turn := await stream(self, request, tell)))
        return turn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchSampler, "sample", recorded)
        patch.setattr(TorchSampler, "stream", recorded_stream)
        yield turns


class Trained:
    """A platform, the model that the supervised run made, and the turns that the engine has sampled."""

    def __init__(self, platform: InMemory, model: str, turns: list[tuple[DrawKey, Turn]]) -> None:
        self.platform, self.model, self.turns = platform, model, turns

    def turns_of(self, key: DrawKey) -> list[Turn]:
        return [turn for place, turn in self.turns if place == key]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trained(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trained]:
    root = tmp_path_factory.mktemp("agents")
    sft, rl = root / "sft.jsonl", root / "rl.jsonl"
    sft.write_text("".join(demonstrations()))
    rl.write_text((json.dumps({"user_prompt": ASK, "ground_truth": "3"}) + "\n") * 4)
    workspace = make_workspace(root / "workspace", client_files())
    with sampled_turns() as turns:
        async with in_memory(root / "home") as platform:
            await platform.upload("demonstrations", sft)
            await platform.upload("questions", rl)
            await platform.workspaces.add(str(workspace), name="w")
            config = supervised()
            model = await platform.run_to_end(config, workspace=None, key="sft")
            yield Trained(platform, f"{model}@last", turns)


def supervised() -> dict[str, dict[str, Any]]:
    """A supervised run of a minute."""
    return {
        "experiment": {"model_path": "scratch:qwen3-tiny", "dataset": "demonstrations"},
        "training": {"lr": 1e-2},
        "advanced": {
            "algorithm": "sft",
            "tuning": "full",
            "max_steps": 150,
            "batch_size": 16,
            "max_sequence_length": 256,
            "state_interval": 150,
        },
        "checkpoints": {"checkpoint_save_freq": 150},
    }


def of(name: str, model: str) -> dict[str, dict[str, Any]]:
    """Two steps of GRPO with a client."""
    return run_config(
        experiment={"entrypoint": f"{name}.py", "model_path": model, "dataset": "questions"},
        training={
            "lr": 1e-4,
            "n_samples_per_prompt": SAMPLES,
            "rollout_batch_size": GROUPS,
            "max_prompt_length": 512,
            "max_response_length": 192,
            "max_answer_length": 48,
            "agent_workflow_timeout_s": 120,
        },
        advanced={"max_steps": STEPS, "deterministic": False},
    )


async def records_of(platform: InMemory, run: str) -> list[tuple[DrawKey, SampleRecord]]:
    """All samples of a run, with their places in it."""
    found = []
    for event in platform.events_of(SampleGenerated):
        if event.spec.owner == run and event.artifact is not None:
            data = await platform.artifacts.get_artifact(event.artifact)
            [record] = SampleBatch.model_validate_json(data).samples
            found.append((event.spec.draw_key(record.index), record))
    return found


@pytest.mark.parametrize("name", NAMES)
async def test_a_framework_trains_two_steps_on_what_was_sampled(
    name: str, trained: Trained
) -> None:
    platform = trained.platform
    trained.turns.clear()
    config = of(f"train_{name}", trained.model)
    config["experiment"]["rollout"] = "clients"
    run = await platform.run_to_end(config, workspace="w", key=name)
    records = await records_of(platform, run)
    assert len(records) == STEPS * GROUPS * SAMPLES
    failed = [record.failure for _, record in records if record.failure]
    assert len(failed) <= len(records) // 4, failed
    kept = [(key, record) for key, record in records if record.failure is None]
    calls = [m.tool_calls for _, record in kept for m in record.messages if m.tool_calls]
    assert len(calls) >= len(kept) // 2, "the model calls the tool"
    assert any(m.role == "tool" and m.content == "3" for _, r in kept for m in r.messages)
    assert any(record.text == "3" for _, record in kept)
    for key, record in kept:
        turns = trained.turns_of(key)
        assert record.num_turns == len(turns)
        sampled = sorted((turn.completion_ids, turn.logprobs) for turn in turns)
        assert sorted(spans_of(record)) == sampled
    updates = [e for e in platform.events_of(PolicyUpdated) if e.run == run and e.step > 0]
    assert [event.step for event in updates] == [1, 2]
    for event in updates:
        assert event.metrics["train/sampler_mismatch"] <= 1e-6


def spans_of(record: SampleRecord) -> Iterator[tuple[tuple[int, ...], tuple[float, ...]]]:
    """The trained tokens of a record, with their logprobs, one span for each turn."""
    for row in record.sequences:
        ids: list[int] = []
        logprobs: list[float] = []
        for token, own, logprob in zip(
            (*row.tokens, -1), (*row.loss_mask, 0), (*row.logprobs, 0.0), strict=True
        ):
            if own:
                ids.append(token)
                logprobs.append(logprob)
            elif ids:
                yield tuple(ids), tuple(logprobs)
                ids, logprobs = [], []
