"""Frameworks that force the type of an answer, unmodified, against the built-in engine: a model with
random weights gives them valid answers, and trains on the logprobs that these were drawn with.

What they force: smolagents a call in each step, pydantic-ai its output tool, the OpenAI Agents SDK and
LangChain a JSON schema, dspy a JSON schema by LiteLLM.
"""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from infra.model_api.gateway.server import HttpGateway
from schemas.events import PolicyUpdated
from schemas.learner import GradedGroup, StepBatch
from schemas.sampling import PolicyRef, SampleRecord, SamplingParams, Turn, sequences_of
from tests.agents.client_process import (
    TYPED_CLIENTS,
    TYPED_NAMES,
    TYPED_PACKAGES,
    ClientProcess,
    client_process,
)
from tests.agents.newer_python import project_of
from tests.agents.test_training import WORKFLOW, of, records_of, sampled_turns, spans_of
from tests.kit.in_memory import in_memory
from tests.kit.platform import make_workspace
from tests.kit.sockets import relayed
from tests.kit.specs import MODEL, group_spec, template
from tests.unit.trainer.support import Shelf, job
from trainer.engine import Engine

pytestmark = [
    pytest.mark.agents,
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.asyncio(loop_scope="module"),
]

SAMPLES = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(request: pytest.FixtureRequest) -> AsyncIterator[ClientProcess]:
    """The process of a client. Its tests share it, because its packages are slow to import."""
    async with client_process(request.param) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    made = Engine(fetch=Shelf().fetch, threads=1)
    yield made
    await made.aclose()


async def answers_of(client: ClientProcess, engine: Engine) -> list[tuple[str, tuple[Turn, ...]]]:
    """The answer and the turns of each sample of a group."""
    params = SamplingParams(max_new_tokens=128, deterministic=True, seed=3)
    given = {"params": params, "policy": PolicyRef(version=0)}
    spec = group_spec(template().model_copy(update=given))
    gateway = HttpGateway(engine.sampler)
    await gateway.start()
    try:
        async with relayed(await gateway.open_socket("r1")) as host:
            sessions = [gateway.open(spec, index, deadline_s=120) for index in range(SAMPLES)]
            said = await asyncio.gather(
                *(client.run(host + one.base_path, one.api_key, "?") for one in sessions)
            )
            assert all("text" in one for one in said), said
            turns = [one.close()[0] for one in sessions]
            return [(one["text"], own) for one, own in zip(said, turns, strict=True)]
    finally:
        await gateway.aclose()


@pytest.mark.parametrize("client", TYPED_NAMES, indirect=True, scope="module")
async def test_a_framework_gets_the_type_that_it_forces(
    client: ClientProcess, engine: Engine
) -> None:
    answers = await answers_of(client, engine)
    verdicts = [json.loads(text) for text, _ in answers]
    assert all(sorted(verdict) == ["number", "sure"] for verdict in verdicts), verdicts
    assert all(isinstance(verdict["sure"], bool) for verdict in verdicts)
    assert len({text for text, _ in answers}) > 1
    samples = []
    for number, (text, turns) in enumerate(answers):
        assert len(turns) == 1, "the first answer is one that the framework takes"
        assert all(turn.grammar is not None for turn in turns)
        samples.append(SampleRecord(index=number, sequences=sequences_of(turns), text=text))
    rewards = tuple(float(number) for number in range(SAMPLES))
    learned = job(MODEL, deterministic=True)
    await engine.learner.initialize(learned)
    batch = StepBatch(step=1, groups=(GradedGroup(0, tuple(samples), rewards),))
    metrics = (await engine.learner.step(learned, batch, export_state=False)).metrics
    assert metrics["train/sampler_mismatch"] < 1e-5
    assert metrics["train/grad_norm"] > 0


@pytest.mark.kills
async def test_the_frameworks_train_two_steps_in_runs(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Whole runs of the product: the packages are those of the rollout's `pyproject.toml`, and the
    clients run in the sandbox. What is trained is what was sampled, token for token."""
    root = tmp_path_factory.mktemp("typed")
    rows = root / "rl.jsonl"
    rows.write_text((json.dumps({"user_prompt": "?", "ground_truth": "3"}) + "\n") * 4)
    files = {f"{name}.py": (TYPED_CLIENTS / f"{name}.py").read_text() for name in TYPED_NAMES}
    files |= {f"train_{name}.py": WORKFLOW.format(name=name) for name in TYPED_NAMES}
    files["pyproject.toml"] = project_of(TYPED_PACKAGES)
    own = {f"rollouts/clients/{path}": text for path, text in files.items()}
    workspace = make_workspace(root / "workspace", own)
    with sampled_turns() as turns:
        async with in_memory(root / "home") as platform:
            await platform.upload("questions", rows)
            await platform.workspaces.add(str(workspace), name="w")
            for name in TYPED_NAMES:
                turns.clear()
                config = of(f"train_{name}", "scratch:qwen3-tiny")
                config["experiment"]["rollout"] = "clients"
                config["training"]["max_prompt_length"] = 800
                config["training"]["max_answer_length"] = 96
                run = await platform.run_to_end(config, workspace="w", key=name)
                records = await records_of(platform, run)
                assert [record.failure for _, record in records] == [None] * len(records)
                for key, record in records:
                    found = [turn for place, turn in turns if place == key]
                    assert all(turn.grammar is not None for turn in found)
                    sampled = sorted((turn.completion_ids, turn.logprobs) for turn in found)
                    assert sorted(spans_of(record)) == sampled
                updates = [e for e in platform.events_of(PolicyUpdated) if e.run == run and e.step]
                assert [event.step for event in updates] == [1, 2]
                assert all(e.metrics["train/sampler_mismatch"] <= 1e-5 for e in updates)
