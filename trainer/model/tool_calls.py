"""Finds reasoning and tool calls in the text of an answer.

How a model writes a call is decided by its chat template. Two forms are known: that of our own template,
and the one of Hermes and Qwen, which many templates share. Calls are only looked for in answers to
requests that offer tools.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from schemas.sampling import Message, ToolCall, ToolSpec
from schemas.text import well_formed

CallForm = Literal["marked", "tagged"]
"""`marked`: `<|tool|>name{arguments}`, where the mark is one token. `tagged`: `<tool_call>{"name": ...,
"arguments": {...}}</tool_call>`."""

MARK = "<|tool|>"
TAG, END_TAG = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"
TAGGED = re.compile(rf"{TAG}(.*?)(?:{END_TAG}|\Z)", re.DOTALL)

LONGEST_NAME = 256
MOST_CALLS = 128


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call in an answer. `arguments` is the JSON text of its arguments, or the text in its place."""

    name: str
    arguments: str


def call_form(template: str, *, is_ours: bool) -> CallForm | None:
    """The form in which a chat template writes calls, or None if no known one is in it."""
    if is_ours:
        return "marked"
    return "tagged" if TAG in template else None


def split_reasoning(text: str, *, is_open: bool) -> tuple[str | None, str]:
    """Return the reasoning of an answer, and its rest. `is_open`: the prompt has begun the reasoning."""
    begun = text.lstrip()
    if not is_open and not begun.startswith(THINK):
        return None, text
    inside, end, rest = begun.removeprefix(THINK).partition(END_THINK)
    return inside.strip(), rest.lstrip("\n") if end else ""


def split_marked(text: str) -> tuple[str, list[FoundCall]]:
    """Return the text before the first mark, and the calls after the marks."""
    content, *parts = text.split(MARK)
    calls = []
    for part in parts[:MOST_CALLS]:
        name, brace, arguments = part.partition("{")
        calls.append(FoundCall(name.strip()[:LONGEST_NAME], brace + arguments))
    return content, calls


def split_tagged(text: str) -> tuple[str, list[FoundCall]]:
    """Return the text around the tagged calls, and the calls. What is not a call stays in the text."""
    calls: list[FoundCall] = []

    def take(found: re.Match[str]) -> str:
        call = _tagged_call(found[1]) if len(calls) < MOST_CALLS else None
        if call is None:
            return found[0]
        calls.append(call)
        return ""

    content = TAGGED.sub(take, text)
    return (content.strip() if calls else content), calls


def _tagged_call(text: str) -> FoundCall | None:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return FoundCall(well_formed(value["name"][:LONGEST_NAME]), arguments_text(arguments))


def arguments_text(arguments: object) -> str:
    """The JSON text of the arguments that a model wrote, or the text in their place. A model may write
    an escape of a lone surrogate."""
    if isinstance(arguments, str):
        return well_formed(arguments)
    return well_formed(json.dumps(arguments, ensure_ascii=False))


def as_message(content: str, calls: Sequence[FoundCall], *, reasoning: str | None) -> Message:
    """An answer as a message. Its calls are numbered from 0 in their ids."""
    numbered = tuple(
        ToolCall(id=f"call_{number}", name=call.name, arguments=call.arguments)
        for number, call in enumerate(calls)
    )
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=numbered)


def template_message(message: Message, *, is_ours: bool) -> dict[str, Any]:
    """A message as chat templates get it, in OpenAI's form. Templates of models get arguments as an
    object where they are one, because most of them write them as JSON themselves."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if is_ours else _as_object(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def template_tool(tool: ToolSpec) -> dict[str, Any]:
    """A tool as chat templates get it, in OpenAI's form."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": _as_object(tool.parameters),
    }
    return {"type": "function", "function": function}


def _as_object(text: str) -> object:
    try:
        value: object = json.loads(text)
        if "\\u" in text:
            value = json.loads(well_formed(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
