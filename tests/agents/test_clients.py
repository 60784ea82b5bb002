"""The unmodified clients and frameworks against the gateway, each in a process of its own: they call
tools, send the conversation back, and the recorded tokens are one training row."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from schemas.sampling import SampleRequest, sequences_of
from tests.agents.client_process import NAMES, ClientProcess, client_process
from tests.kit.scripted_policy import ScriptedPolicy, open_sample, said

pytestmark = [
    pytest.mark.agents,
    pytest.mark.processes,
    pytest.mark.asyncio(loop_scope="module"),
]


class Counting(ScriptedPolicy):
    """A policy that can say how long a prompt is."""

    async def count_prompt_tokens(self, request: SampleRequest) -> int:
        return len(request.messages)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(request: pytest.FixtureRequest) -> AsyncIterator[ClientProcess]:
    """The process of a client. Its tests share it, because its packages are slow to import."""
    async with client_process(request.param) as started:
        yield started


async def run_client(client: ClientProcess, url: str, key: str) -> str:
    """Run a client to its end, and return its answer."""
    answer = await client.run(url, key, "17 + 25?")
    assert "text" in answer, answer
    return str(answer["text"]).strip()


@pytest.mark.parametrize("client", NAMES, indirect=True, scope="module")
async def test_a_client_calls_tools_and_its_turns_are_one_row(client: ClientProcess) -> None:
    script = [
        said("I add.", reasoning="hm", add='{"a": 17,\n "b": 25}'),
        said(add='{"b": 1, "a": 41}'),
        said("42"),
    ]
    async with open_sample(Counting(script)) as (url, session):
        assert (await run_client(client, url, session.api_key)).endswith("42")
        turns, conversation = session.close()
    assert len(turns) == 3
    assert [m.content for m in conversation if m.role == "tool"] == ["42", "42"]
    assert [m.tool_calls for m in conversation if m.role == "assistant"] == [
        turn.message.tool_calls for turn in turns
    ]
    (row,) = sequences_of(turns)
    sampled = [token for token, own in zip(row.tokens, row.loss_mask, strict=True) if own]
    assert sampled == [token for turn in turns for token in turn.completion_ids]


@pytest.mark.parametrize(
    "client",
    [name for name in NAMES if name != "anthropic_messages"],
    indirect=True,
    scope="module",
)
async def test_a_call_whose_arguments_are_no_json_is_answered_with_an_error(
    client: ClientProcess,
) -> None:
    """The policy sees what went wrong, or the framework gives up; no other row begins."""
    script = [said(add="{no json"), said("42")]
    async with open_sample(Counting(script)) as (url, session):
        await run_client(client, url, session.api_key)
        turns, _ = session.close()
    assert 1 <= len(turns) <= 2
    assert len(sequences_of(turns)) == 1
