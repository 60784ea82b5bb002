"""The built-in loop: it asks, calls, and ends."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace import AgentWorkflow, WorkflowContext, tool, workflow
from headrace.http import EndpointRefused
from headrace.tools.tool_set import ToolSet, offered_tools

Body = dict[str, Any]


@tool
def add(left: int, right: int) -> int:
    """Add."""
    return left + right


def call(left: int, right: int) -> Body:
    function = {"name": "add", "arguments": json.dumps({"left": left, "right": right})}
    called = {"id": "c", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [called]}


SAID: Body = {"role": "assistant", "content": "5", "tool_calls": None, "refusal": None}


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Body]]:
    """Let the endpoint give these answers; the requests are returned."""

    def answer_with(*answers: Body | Exception) -> list[Body]:
        bodies: list[Body] = []

        async def post_json(url: str, body: Body, **options: Any) -> Body:
            bodies.append(json.loads(json.dumps(body)))
            given = answers[min(len(bodies), len(answers)) - 1]
            if isinstance(given, Exception):
                raise given
            return {"choices": [{"message": given}]}

        monkeypatch.setattr(workflow, "post_json", post_json)
        return bodies

    return answer_with


def context(*tools: Any, **options: Any) -> WorkflowContext:
    prompt: list[dict[str, object]] = [{"role": "user", "content": "2 + 3?"}]
    return WorkflowContext(
        prompt=prompt,
        metadata={},
        base_url="http://127.0.0.1:1/v1",
        api_key="k",
        tools=ToolSet(offered_tools(tools)),
        **options,
    )


async def test_the_loop_ends_with_an_answer_without_calls(policy: Any) -> None:
    bodies = policy(call(2, 3), SAID)
    spoken = await context(add).loop(max_tokens=8)
    assert [message["role"] for message in spoken] == ["user", "assistant", "tool", "assistant"]
    assert spoken[2] == {"role": "tool", "tool_call_id": "c", "name": "add", "content": "5"}
    assert spoken[3] == {"role": "assistant", "content": "5"}
    assert bodies[1]["messages"] == spoken[:3]
    assert [body["max_tokens"] for body in bodies] == [8, 8]
    assert [body["tools"][0]["function"]["name"] for body in bodies] == ["add", "add"]


async def test_the_loop_asks_at_most_max_turns_times(policy: Any) -> None:
    bodies = policy(call(2, 3))
    spoken = await context(add, max_turns=3).loop()
    assert len(bodies) == 3
    assert spoken[-1] == call(2, 3)
    await context(add).loop(max_turns=1)
    assert len(bodies) == 4
    with pytest.raises(ValueError, match="at least 1, got 0"):
        await context(add).loop(max_turns=0)


async def test_a_conversation_that_grows_too_long_ends(policy: Any) -> None:
    refused = EndpointRefused(400, "too long", "context_length_exceeded")
    policy(call(2, 3), refused)
    spoken = await context(add).loop()
    assert [message["role"] for message in spoken] == ["user", "assistant", "tool"]
    policy(refused)
    with pytest.raises(RuntimeError, match="answered 400: too long"):
        await context(add).loop()
    policy(call(2, 3), EndpointRefused(408, "late", "deadline_exceeded"))
    with pytest.raises(EndpointRefused, match="late"):
        await context(add).loop()


async def test_a_workflow_without_run_loops_over_its_tools(policy: Any) -> None:
    bodies = policy(call(2, 3), SAID)
    assert await AgentWorkflow().run(context(add)) is None
    assert len(bodies) == 2
    with pytest.raises(NotImplementedError, match="give the workflow tools"):
        await AgentWorkflow().run(context())


async def test_tools_of_a_request_are_functions_or_in_the_form_of_openai(policy: Any) -> None:
    bodies = policy(call(2, 3))
    written = {"type": "function", "function": {"name": "sub", "parameters": {}}}
    reply = await context().chat([], tools=[add, written])
    assert {one["function"]["name"] for one in bodies[0]["tools"]} == {"add", "sub"}
    assert await context().call_tools(reply, [add]) == [
        {"role": "tool", "tool_call_id": "c", "name": "add", "content": "5"}
    ]
    await context().chat([])
    assert "tools" not in bodies[1]


async def test_a_tool_may_take_the_context(policy: Any) -> None:
    @tool
    def ask(of: str, ctx: WorkflowContext) -> str:
        return f"{of} {ctx.api_key}"

    function = {"name": "ask", "arguments": '{"of": "x"}'}
    ctx = context(ask)
    assert "ctx" not in str(ctx.tools.specs)
    [answer] = await ctx.call_tools({"tool_calls": [{"id": "c", "function": function}]})
    assert answer["content"] == "x k"
