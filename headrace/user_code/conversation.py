"""The conversation that a workflow returns, as the parent process gets it."""

import inspect
import json
from typing import Any

Json = dict[str, Any]

MOST_MESSAGES = 4096
MOST_CHARACTERS = 4 << 20
MOST_CALLS = 128
LONGEST_NAME = 100


def conversation(returned: object, *, who: str = "run") -> list[Json] | None:
    """Return what `who`, the method of a workflow, returned as messages, or None if it returned None.
    Raises TypeError when it is neither None nor a list of messages in OpenAI's form, ValueError when it
    is too long."""
    if returned is None:
        return None
    if not isinstance(returned, list):
        raise TypeError(
            f"{who} returned {type(returned).__name__}; return a list of messages or None"
        )
    messages = [_message(message, who) for message in returned[: MOST_MESSAGES + 1]]
    size = sum(_size(message) for message in messages)
    if len(messages) > MOST_MESSAGES or size > MOST_CHARACTERS:
        raise ValueError(
            f"{who} returned {len(returned)} messages of {size} characters; return at most "
            f"{MOST_MESSAGES} messages of {MOST_CHARACTERS} characters in all"
        )
    return messages


def _message(message: object, who: str) -> Json:
    """Return one message with the fields that are kept. A message with tool calls needs no content."""
    if inspect.iscoroutine(message):
        raise TypeError(
            f"{who} returned the coroutine {message.__qualname__} as a message; write `await` before "
            "the call that made it"
        )
    if not isinstance(message, dict) or "role" not in message:
        raise TypeError(f"{who} returned a message without role or content; give each message both")
    if "content" not in message and not message.get("tool_calls"):
        raise TypeError(f"{who} returned a message without role or content; give each message both")
    kept: Json = {
        "role": str(message["role"])[:LONGEST_NAME],
        "content": str(message.get("content") or ""),
    }
    if message.get("tool_calls"):
        kept["tool_calls"] = _calls(message["tool_calls"], who)
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            kept[name] = str(message[name])[:LONGEST_NAME]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        kept["reasoning"] = reasoning
    return kept


def _calls(calls: object, who: str) -> list[Json]:
    """Return tool calls as id, name and arguments. Raises TypeError unless they are in OpenAI's form."""
    if not isinstance(calls, list) or len(calls) > MOST_CALLS:
        raise TypeError(
            f"{who} returned a message whose tool_calls are not a list of at most {MOST_CALLS} calls"
            "; return the messages of the policy as they were"
        )
    kept: list[Json] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            raise TypeError(
                f"{who} returned a tool call without function.name; return the messages of the policy "
                "as they were"
            )
        arguments = function.get("arguments") or ""
        kept.append(
            {
                "id": str(call.get("id") or "")[:LONGEST_NAME],
                "name": str(function["name"])[:LONGEST_NAME],
                "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
            }
        )
    return kept


def _size(message: Json) -> int:
    calls = sum(len(call["arguments"]) for call in message.get("tool_calls", ()))
    return len(message["content"]) + len(message.get("reasoning", "")) + calls
