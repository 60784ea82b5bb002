"""The `messages` column of a dataset: whole conversations, as chat datasets usually have them.

With a label column, the conversation is the prompt. It ends with a message of the user or a tool.
Without a label column, the conversation is a demonstration. It ends with the assistant's answer, which
is to be learned. That answer becomes the row's label, and all messages before it, including earlier
answers, become its prompt. Answers may call tools, in OpenAI's form. The column `tools` has the tools
that the conversation offers. Messages may have ShareGPT's form `{from, value}` instead.
"""

import json
from collections.abc import Sequence

from pydantic import ValidationError

from producers.core.datasets.strict_json import loads
from schemas.sampling import Message, ToolCall, ToolSpec

ROLES = ("system", "user", "assistant", "tool")
FIELDS = {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content"}
MOST_TOOLS = 128

SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
"""`from` of ShareGPT's form -> role."""


class BadMessages(ValueError):
    """A conversation is wrong. The text says what is wrong, and with which message of the row."""


def parse_conversation(value: object, *, labelled: bool) -> tuple[tuple[Message, ...], str | None]:
    """The prompt and the label in a cell of the column. `labelled` means that another column holds the
    label; the label is None then. Raises BadMessages."""
    messages = parse_messages(value)
    if not messages:
        raise BadMessages("is an empty list; give at least one message")
    last = messages[-1]
    if labelled:
        if last.role not in ("user", "tool"):
            raise BadMessages(
                f"ends with the {last.role}; with a label column it is a prompt and must end with "
                "the user"
            )
        return messages, None
    if last.role != "assistant":
        raise BadMessages(
            f"ends with the {last.role}; a demonstration ends with the assistant's answer (or "
            "give the answer in a column ground_truth)"
        )
    if len(messages) == 1:
        raise BadMessages("has only the answer; put the question before it")
    if last.tool_calls:
        raise BadMessages("ends with a call of a tool; end with the answer that follows its result")
    if not last.content:
        raise BadMessages("ends with an empty answer; give the answer's text")
    return messages[:-1], last.content


def parse_messages(value: object) -> tuple[Message, ...]:
    """The messages of a list, or of its JSON text. Raises BadMessages."""
    return tuple(_parse_message(i, one) for i, one in enumerate(_parse_list(value)))


def _parse_list(value: object) -> Sequence[object]:
    """A list, or its JSON text (as in CSV)."""
    if isinstance(value, str):
        try:
            value = loads(value)
        except (ValueError, RecursionError) as error:
            raise BadMessages("is not a list of messages in JSON") from error
    if not isinstance(value, list):
        raise BadMessages("must be a list of {role, content}")
    return value


def parse_tools(value: object) -> tuple[ToolSpec, ...]:
    """The tools in a cell of the column `tools`, in OpenAI's form, or none. Raises BadMessages."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        try:
            value = loads(value)
        except (ValueError, RecursionError) as error:
            raise BadMessages("is not a list of tools in JSON") from error
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise BadMessages(f"must be a list of at most {MOST_TOOLS} tools")
    return tuple(_parse_tool(i, one) for i, one in enumerate(value))


def _parse_tool(index: int, value: object) -> ToolSpec:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadMessages(f"[{index}] must be a tool with function.name, as in OpenAI's API")
    parameters = function.get("parameters") or {}
    return ToolSpec(
        name=function["name"],
        description=str(function.get("description") or ""),
        parameters=parameters if isinstance(parameters, str) else json.dumps(parameters),
    )


def _parse_message(index: int, value: object) -> Message:
    if not isinstance(value, dict):
        raise BadMessages(f"[{index}] must be an object with role and content")
    if set(value) & {"from", "value"} and not set(value) & {"role", "content"}:
        return _parse_sharegpt(index, value)
    given = {name: one for name, one in value.items() if one not in (None, [])}
    if unknown := sorted(set(given) - FIELDS):
        raise BadMessages(
            f"[{index}] has {', '.join(map(repr, unknown))}, which are not read; the fields are: "
            f"{', '.join(sorted(FIELDS))}"
        )
    calls = given.pop("tool_calls", [])
    if calls:
        given = {"content": "", **given, "tool_calls": _parse_calls(index, calls)}
    if reasoning := given.pop("reasoning_content", None):
        given["reasoning"] = reasoning
    try:
        return Message.model_validate(given, strict=True)
    except ValidationError as error:
        raise BadMessages(
            f"[{index}] needs a role of {', '.join(ROLES)} and content that is a string"
        ) from error


def _parse_sharegpt(index: int, value: dict[str, object]) -> Message:
    """A message in the form `{from, value}`. The value of a call is one call, or a list of them."""
    speaker, text = value.get("from"), value.get("value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS or not isinstance(text, str):
        raise BadMessages(
            f"[{index}] needs `from` as one of {', '.join(SPEAKERS)}, and a `value` that is a string"
        )
    role = SPEAKERS[speaker]
    if speaker != "function_call":
        return Message.model_validate({"role": role, "content": text})
    try:
        called = loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessages(f"[{index}] is a function_call whose value is not JSON") from error
    calls = _parse_calls(index, called if isinstance(called, list) else [called])
    return Message(role="assistant", content="", tool_calls=calls)


def _parse_calls(index: int, value: object) -> tuple[ToolCall, ...]:
    """The calls of an answer, with the JSON text of their arguments. A call without an id gets one."""
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise BadMessages(f"[{index}].tool_calls must be a list of at most {MOST_TOOLS} calls")
    found = []
    for number, call in enumerate(value):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadMessages(
                f"[{index}].tool_calls[{number}] must have function.name, as in OpenAI's API"
            )
        arguments = function.get("arguments", {})
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        name = str(call.get("id") or f"call_{number}")
        found.append(ToolCall(id=name, name=function["name"], arguments=written))
    return tuple(found)
