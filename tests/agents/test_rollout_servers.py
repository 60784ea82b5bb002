"""Programs written for `osmosis-ai`, and environments of `verifiers`, with the real packages: they are
served, call the policy with their tools, and what is trained is what was sampled."""

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.model_api.gateway.server import HttpGateway
from infra.operations.local.free_port import free_port
from schemas.sampling import Message, SampleRequest, Turn, sequences_of
from tests.agents import rollout_programs as programs
from tests.agents.newer_python import packaged
from tests.kit.scripted_policy import ScriptedPolicy, said
from tests.kit.sockets import relayed
from tests.kit.specs import group_spec, template

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.agents, pytest.mark.processes]

CALL = said(multiply='{"a": 6, "b": 7}')
ANSWER = said("It is #### 42")
SAMPLES = 4


class Calculator(ScriptedPolicy):
    """A policy that calls its tool first, and then says the result. Every second sample is wrong."""

    async def sample(self, request: SampleRequest) -> Turn:
        is_first = request.messages[-1].role != "tool"
        right = ANSWER if request.key.sample % 2 == 0 else said("It is #### 41")
        self.script = [CALL if is_first else right] * (len(self.asked) + 1)
        return await super().sample(request)


@dataclass
class Made:
    """What came back from a program, and the turns of each sample."""

    dialect: str
    rewards: list[object]
    turns: Sequence[tuple[Turn, ...]]
    conversations: Sequence[tuple[Message, ...]]
    tools: set[str]


async def make(
    python: Path,
    main: str,
    directory: Path,
    metadata: object,
    *,
    settings: str = "",
    policy: ScriptedPolicy | None = None,
) -> Made:
    """Have a program make SAMPLES samples of a group."""
    entry = directory / "rollouts" / "multiply" / "main.py"
    entry.parent.mkdir(parents=True)
    entry.write_text(main)
    (entry.parent / "pyproject.toml").write_text(settings)
    policy = policy or Calculator([])
    gateway = HttpGateway(policy)
    await gateway.start()
    spec = group_spec(template(num_samples=SAMPLES))
    sessions = [gateway.open(spec, index, deadline_s=300) for index in range(SAMPLES)]
    try:
        async with relayed(await gateway.open_socket("r1")) as host:
            requests = [
                {
                    "name": f"sample-{index}",
                    "messages": [{"role": "user", "content": "6 * 7?"}],
                    "label": "42",
                    "metadata": metadata,
                    "chat_url": f"{host}{session.base_path}",
                    "api_key": session.api_key,
                    "agent_timeout_s": 200,
                    "grader_timeout_s": 30,
                }
                for index, session in enumerate(sessions)
            ]
            answer = await serve(python, entry, requests)
    finally:
        closed = [session.close() for session in sessions]
        await gateway.aclose()
    assert "rewards" in answer, answer
    tools = {tool.name for request in policy.asked for tool in request.tools}
    return Made(
        answer["dialect"],
        answer["rewards"],
        [turns for turns, _ in closed],
        [conversation for _, conversation in closed],
        tools,
    )


async def serve(python: Path, entry: Path, requests: object) -> dict[str, Any]:
    program = str(ROOT / "tests" / "agents" / "serve_program.py")
    process = await asyncio.create_subprocess_exec(
        *(str(python), program, str(entry), json.dumps(requests)),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(500):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()[-3000:]
    answer: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return answer


TASK = {"task": json.dumps({"prompt": "6 * 7?", "answer": 42.0})}


@pytest.mark.parametrize(
    ("environment", "main", "dialect", "metadata"),
    [
        ("osmosis", programs.STRANDS, "leases", {}),
        ("osmosis", programs.OPENAI_AGENTS, "leases", {}),
        ("older_osmosis", programs.OLDER_STRANDS, "reports", {}),
        ("older_osmosis", programs.OLDER_OPENAI_AGENTS, "reports", {}),
        ("verifiers", programs.VERIFIERS_V1, "leases", TASK),
        ("older_verifiers", programs.VERIFIERS_V0, "leases", {"task": 0}),
    ],
    ids=["strands", "openai-agents", "older-strands", "older-openai-agents", "v1", "v0"],
)
async def test_a_program_makes_its_samples_and_grades_them(
    tmp_path: Path,
    environment: str,
    main: str,
    dialect: str,
    metadata: object,
) -> None:
    made = await make(packaged(environment), main, tmp_path, metadata)
    assert (made.dialect, made.rewards) == (dialect, [1.0, 0.0] * (SAMPLES // 2))
    assert made.tools == {"multiply"}
    for turns, conversation in zip(made.turns, made.conversations, strict=True):
        assert [turn.message for turn in turns][:1] == [CALL]
        assert [message.role for message in conversation] == [
            "user",
            "assistant",
            "tool",
            "assistant",
        ]
        assert float(conversation[2].content) == 42.0
        (row,) = sequences_of(turns)
        sampled = [i for i, kept in zip(row.tokens, row.loss_mask, strict=True) if kept]
        assert sampled == [i for turn in turns for i in turn.completion_ids], "each id once"
        assert row.tokens[: len(turns[0].prompt_ids)] == turns[0].prompt_ids


class Player(ScriptedPolicy):
    """A policy that answers at once. Every second sample is wrong."""

    async def sample(self, request: SampleRequest) -> Turn:
        right = request.key.sample % 2 == 0
        self.script = [said(f"It is {42 if right else 41}")] * (len(self.asked) + 1)
        return await super().sample(request)


async def test_an_environment_of_openenv_is_played_by_the_taskset_of_verifiers(
    tmp_path: Path,
) -> None:
    """The entry point also serves the environment, at an address in its sandbox."""
    port = str(free_port())
    task = {"task": json.dumps(programs.OPENENV_TASK).replace("NUMBER", port)}
    made = await make(
        packaged("openenv"),
        programs.OPENENV.replace("NUMBER", port),
        tmp_path,
        task,
        settings=programs.OPENENV_SETTINGS.replace("NUMBER", port),
        policy=Player([]),
    )
    assert (made.dialect, made.rewards) == ("leases", [1.0, 0.0] * (SAMPLES // 2))
    for turns, conversation in zip(made.turns, made.conversations, strict=True):
        assert "6 * 7?" in conversation[0].content
        (row,) = sequences_of(turns)
        sampled = [i for i, kept in zip(row.tokens, row.loss_mask, strict=True) if kept]
        assert sampled == [i for turn in turns for i in turn.completion_ids], "each id once"
