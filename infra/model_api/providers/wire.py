"""Chat completions as providers speak them: bodies of requests, and answers. It does no IO."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.errors import TransientError
from schemas.sampling import Message, ProviderRef, ToolCall, ToolSpec, Usage
from schemas.text import well_formed

MOST_CALLS = 128
"""The most tool calls of one answer that are kept."""

LONGEST_NAME = 256

MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class ProviderAnswer:
    """The answer of a provider's model. `finish_reason` is the provider's own word."""

    message: Message
    finish_reason: str
    usage: Usage


def request_body(
    provider: ProviderRef,
    messages: Sequence[Message],
    *,
    tools: Sequence[ToolSpec] = (),
    options: Mapping[str, object],
) -> dict[str, object]:
    """The body of a request. `options` are further parameters of chat completions."""
    body: dict[str, object] = {
        "model": provider.model,
        "messages": [_wire_message(message) for message in messages],
        **options,
    }
    if tools:
        body["tools"] = [_wire_tool(tool) for tool in tools]
    return body


def _wire_message(message: Message) -> dict[str, object]:
    """Reasoning is left out, because providers do not take it back."""
    wire: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["content"] = message.content or None
        wire["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    return wire


def _wire_tool(tool: ToolSpec) -> dict[str, object]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": json.loads(tool.parameters),
        },
    }


def parse_completion(body: bytes, provider: ProviderRef) -> ProviderAnswer:
    """The first choice of an answer. Raises TransientError when the answer is not a chat completion."""
    try:
        document = json.loads(body)
        choice = document["choices"][0]
        wire = choice["message"]
        message = Message(
            role="assistant",
            content=_text(wire.get("content")),
            reasoning=_text(wire.get("reasoning_content") or wire.get("reasoning")) or None,
            tool_calls=tuple(
                _tool_call(call, number)
                for number, call in enumerate((wire.get("tool_calls") or ())[:MOST_CALLS])
            ),
        )
        reason = str(choice.get("finish_reason") or "stop")[:LONGEST_NAME]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise TransientError(
            f"the answer of {provider.name} is not a chat completion; check that its base URL is that "
            "of an OpenAI-compatible API"
        ) from error
    return ProviderAnswer(message, reason, _usage(document.get("usage"), provider))


def _text(content: object) -> str:
    """Text, or the text parts of a list."""
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return well_formed("".join(part for part in parts if isinstance(part, str)))
    return well_formed(content) if isinstance(content, str) else ""


def _tool_call(call: Mapping[str, Any], number: int) -> ToolCall:
    function = call["function"]
    arguments = function.get("arguments")
    return ToolCall(
        id=well_formed(str(call.get("id") or f"call_{number}")[:LONGEST_NAME]),
        name=well_formed(str(function["name"])[:LONGEST_NAME]),
        arguments=well_formed(
            arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        ),
    )


def _usage(found: object, provider: ProviderRef) -> Usage:
    """The usage of an answer. Its price is the provider's own, or follows from that of the tokens."""
    usage = found if isinstance(found, dict) else {}
    prompt, answer = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    usd = usage.get("cost")
    if (
        isinstance(usd, bool)
        or not isinstance(usd, int | float)
        or not math.isfinite(usd)
        or usd < 0
    ):
        usd = None
        if provider.usd_per_million is not None:
            of_prompt, of_answer = provider.usd_per_million
            usd = (prompt * of_prompt + answer * of_answer) / MILLION
    return Usage(prompt_tokens=prompt, completion_tokens=answer, usd=usd)


def _count(value: object) -> int:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return max(0, min(int(value), 1 << 40)) if is_count and isinstance(value, int) else 0
