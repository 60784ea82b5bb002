"""Finds the recorded turn that a request continues, whatever a framework has changed on the way.

Frameworks resend a conversation with each request, and rarely as they got it. They parse the arguments
of calls and write them again, drop reasoning, give calls other ids, and leave out fields. So
conversations are compared in a canonical form, and the recorded messages take the place of those that
were resent. What was sampled then stays what is trained. A conversation that differs in its meaning (an
edited answer, a shorter history, other tools) matches nothing, and starts a new training row.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

from schemas.sampling import Message, ToolSpec


class RecordedConversation(Protocol):
    """A recorded conversation, which ends with an answer of the policy."""

    @property
    def conversation(self) -> tuple[Message, ...]: ...

    @property
    def tools(self) -> tuple[ToolSpec, ...]: ...


NOTHING = "{}"

SHORT, KEPT = 4096, 512
"""How many characters a text may have that is remembered, and how many of them are."""

C = TypeVar("C", bound=RecordedConversation)


class Histories(Generic[C]):
    """Recorded conversations by their canonical form."""

    def __init__(self) -> None:
        self._found: dict[bytes, C] = {}

    def add(self, recorded: C) -> None:
        """Record a conversation. A later one with the same canonical form takes its place."""
        *_, key = _keys(recorded.tools, recorded.conversation)
        self._found[key] = recorded

    def find_history(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]
    ) -> tuple[C | None, tuple[Message, ...], tuple[ToolSpec, ...]]:
        """Return the longest recorded conversation that these messages extend, and the messages and
        tools with everything recorded in place of what was resent."""
        extended, size = None, 0
        if self._found:
            for number, key in enumerate(_keys(tools, messages)):
                found = self._found.get(key)
                if found is not None and number < len(messages):
                    extended, size = found, number
        if extended is None:
            return None, messages, tools
        recorded = extended.conversation
        ids = _new_ids(messages[:size], recorded)
        rest = tuple(_with_new_id(message, ids) for message in messages[size:])
        return extended, (*recorded, *rest), extended.tools


def _new_ids(resent: Sequence[Message], recorded: Sequence[Message]) -> dict[str, str]:
    """The ids of calls as they were resent -> as they are recorded."""
    return {
        other.id: call.id
        for one, two in zip(resent, recorded, strict=True)
        for other, call in zip(one.tool_calls, two.tool_calls, strict=True)
    }


def _with_new_id(message: Message, ids: dict[str, str]) -> Message:
    new = ids.get(message.tool_call_id or "")
    if new is None or new == message.tool_call_id:
        return message
    return message.model_copy(update={"tool_call_id": new})


def prompt_key(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> bytes:
    """Return a key that is equal for requests whose prompts may have equal tokens. Templates drop ids,
    names and earlier reasoning, and some cut the white space around texts."""
    shown = [[message.role, message.content.strip(), _list_calls(message)] for message in messages]
    return _digest(b"", [_list_tools(tools), shown])


def _keys(tools: Sequence[ToolSpec], messages: Sequence[Message]) -> list[bytes]:
    """The keys of the conversations with the first 0, 1, 2, ... of these messages."""
    keys = [_digest(b"", _list_tools(tools))]
    for message in messages:
        keys.append(_digest(keys[-1], canonical(message)))
    return keys


def _list_tools(tools: Sequence[ToolSpec]) -> list[list[str]]:
    return [[tool.name, tool.description, canonical_json(tool.parameters)] for tool in tools]


def _list_calls(message: Message) -> list[list[str]]:
    return [[call.name, canonical_json(call.arguments)] for call in message.tool_calls]


def _digest(before: bytes, value: object) -> bytes:
    data = before + json.dumps(value, ensure_ascii=True).encode()
    return hashlib.blake2b(data, digest_size=16).digest()


def canonical(message: Message) -> list[object]:
    """The parts of a message that give it its meaning. Ids, names of speakers and reasoning are not
    among them, and neither is white space around an answer."""
    if message.role != "assistant":
        return [message.role, message.content]
    return [message.role, message.content.strip(), _list_calls(message)]


def canonical_json(text: str) -> str:
    """JSON text in one form, so that texts with equal values are equal. Short texts are remembered,
    because each request of a sample has the same tools and calls again."""
    return _remembered_json(text) if len(text) <= SHORT else _canonical_json(text)


def _canonical_json(text: str) -> str:
    """JSON text without what does not change its value: white space, escapes, the order of keys, and
    `1.0` for `1`. A text that is not JSON is `{}`, because that is what some frameworks make of it."""
    try:
        value = json.loads(text or NOTHING, parse_float=_number, parse_constant=str)
        return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return NOTHING


_remembered_json = lru_cache(KEPT)(_canonical_json)


def _number(text: str) -> float | int | str:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        return text
    return int(number) if number.is_integer() else number
