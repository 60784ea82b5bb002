"""The built-in loop of a workflow with tools: ask the policy, make its calls, ask again."""

from typing import Any, Protocol

from headrace.http import EndpointRefused
from headrace.tools.tool_set import ChatMessage, ToolSet

DEFAULT_TURNS = 10

ENDS = (
    "context_length_exceeded",
    "budget_exceeded",
    "max_turns_exceeded",
    "max_sample_tokens_exceeded",
    "max_response_length_exceeded",
)
"""Refusals that end a conversation. The answers until then are the sample."""


class LoopContext(Protocol):
    """The part of a workflow's context that the loop needs."""

    async def chat(self, messages: list[ChatMessage], **options: Any) -> ChatMessage: ...
    async def call_tools(
        self, reply: ChatMessage, tools: ToolSet | None = None
    ) -> list[ChatMessage]: ...


async def run_loop(
    ctx: LoopContext,
    messages: list[ChatMessage],
    *,
    tools: ToolSet,
    max_turns: int,
    options: dict[str, object],
) -> list[ChatMessage]:
    """Ask the policy until it calls no tool, or it was asked `max_turns` times. Returns the whole
    conversation. The calls of the last turn are not made, because no answer would read them. A
    conversation that grows too long for the policy ends there."""
    if max_turns < 1:
        raise ValueError(f"max_turns must be at least 1, got {max_turns}")
    conversation = list(messages)
    for turn in range(1, max_turns + 1):
        try:
            reply = await ctx.chat(conversation, tools=tools, **options)
        except EndpointRefused as error:
            if turn > 1 and error.code in ENDS:
                break
            raise
        conversation.append(reply)
        if not reply.get("tool_calls"):
            break
        if turn < max_turns:
            conversation += await ctx.call_tools(reply, tools)
    return conversation
