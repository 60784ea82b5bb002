"""The unmodified clients and frameworks train: two steps of GRPO with a tool call, on a model that a
short supervised run has taught to call the tool. What is trained is what was sampled, token for token.

The clients run as processes of this user and not in a sandbox, because the sandbox's own tests cover
that. Everything else is the product: consumers, gateway, engine and learner.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import Any

import pytest
import pytest_asyncio

from infra.gateway.server import HttpGateway
from infra.ports.packages import DeclaredPackages, ResolvedPackages
from infra.ports.services import GraderResult, SandboxOwner, ServedResult, WorkflowResult
from schemas.errors import FailureCategory, UserCodeError
from schemas.events import PolicyUpdated, SampleGenerated
from schemas.sampling import (
    DrawKey,
    Grade,
    Message,
    SampleBatch,
    SampleRecord,
    SampleRequest,
    Turn,
)
from schemas.specs import DiscoveredRollout, Entrypoint, EnvironmentRef, RolloutRef
from tests.agents.client_process import NAMES, ClientProcess, client_process
from tests.kit.in_memory import InMemory, in_memory
from tests.kit.platform import make_workspace, run_config
from tests.kit.sockets import relayed
from trainer.sampler.engine import TorchSampler

pytestmark = [
    pytest.mark.agents,
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


class Clients:
    """`infra.ports.services.UserCode` whose workflows are the attempts of a client, chosen by the name
    of the rollout's entry point."""

    def __init__(self, gateway: HttpGateway) -> None:
        self._gateway = gateway
        self._stack = AsyncExitStack()
        self._clients: dict[str, ClientProcess] = {}
        self._hosts: dict[str, str] = {}
        self._starting = asyncio.Lock()
        self.errors: list[str] = []

    async def resolve(self, declared: DeclaredPackages) -> ResolvedPackages:
        raise NotImplementedError(f"{declared.path} asks for packages")

    async def discover(
        self,
        snapshot: bytes,
        entrypoints: Sequence[Entrypoint],
        *,
        environments: Mapping[str, EnvironmentRef] = MappingProxyType({}),
    ) -> tuple[DiscoveredRollout, ...]:
        return tuple(
            DiscoveredRollout(entrypoint=each, workflow="Client", grader="Correct")
            for each in entrypoints
        )

    async def run_workflow(
        self,
        rollout: RolloutRef,
        *,
        owner: SandboxOwner,
        sample: str,
        prompt: Sequence[Message],
        metadata: Mapping[str, object],
        base_path: str,
        api_key: str,
    ) -> WorkflowResult:
        name = rollout.entrypoint.path.removesuffix(".py")
        async with self._starting:
            if name not in self._clients:
                self._clients[name] = await self._stack.enter_async_context(client_process(name))
            if owner.run not in self._hosts:
                socket = await self._gateway.open_socket(owner.run)
                self._hosts[owner.run] = await self._stack.enter_async_context(relayed(socket))
        url = f"{self._hosts[owner.run]}{base_path}"
        answer = await self._clients[name].run(url, api_key, prompt[-1].content)
        if "error" in answer:
            self.errors.append(answer["error"])
            raise UserCodeError(FailureCategory.AGENT, answer["error"])
        return WorkflowResult(None)

    async def run_served(
        self,
        rollout: RolloutRef,
        *,
        owner: SandboxOwner,
        sample: str,
        prompt: Sequence[Message],
        label: str | None,
        metadata: Mapping[str, object],
        base_path: str,
        api_key: str,
    ) -> ServedResult:
        raise AssertionError(f"{rollout.entrypoint} is not a rollout server")

    async def grade(
        self,
        rollout: RolloutRef,
        *,
        owner: SandboxOwner,
        group: str,
        label: str | None,
        metadata: Mapping[str, object],
        samples: Sequence[SampleRecord],
    ) -> GraderResult:
        """An answer is right when it is the label. A call earns a little, so that rewards differ."""
        return GraderResult(
            tuple(
                Grade(index=each.index, reward=(each.text == label) + 0.01 * len(each.text))
                for each in samples
            )
        )

    async def aclose(self) -> None:
        await self._stack.aclose()


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
    workspace = make_workspace(
        root / "workspace", {f"rollouts/say/{name}.py": "# a client\n" for name in NAMES}
    )
    turns: list[tuple[DrawKey, Turn]] = []
    sample = TorchSampler.sample

    async def recorded(self: TorchSampler, request: SampleRequest) -> Turn:
        turn = await sample(self, request)
        turns.append((request.key, turn))
        return turn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchSampler, "sample", recorded)
        async with in_memory(root / "home", user_code=Clients) as platform:
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
            "max_response_length": 48,
            "agent_workflow_timeout_s": 120,
        },
        advanced={"max_steps": STEPS, "deterministic": False},
    )


async def records_of(platform: InMemory, run: str) -> list[tuple[DrawKey, SampleRecord]]:
    """All samples of a run, with their places in it."""
    found = []
    for event in platform.events_of(SampleGenerated):
        if event.spec.owner == run and event.artifact is not None:
            data = await platform.artifacts.get(event.artifact)
            [record] = SampleBatch.model_validate_json(data).samples
            found.append((event.spec.draw_key(record.index), record))
    return found


@pytest.mark.parametrize("name", NAMES)
async def test_a_framework_trains_two_steps_on_what_was_sampled(
    name: str, trained: Trained
) -> None:
    platform = trained.platform
    trained.turns.clear()
    run = await platform.run_to_end(of(name, trained.model), workspace="w", key=name)
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
