"""A request to the policy, apart from the wire format that it came in.

Each module of this folder reads one wire format into a `ModelRequest`, and writes the turns that were
sampled for it. They do no IO.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from infra.model_api.wire.constraints import mask_constraint
from infra.model_api.wire.errors import GatewayError
from infra.model_api.wire.tools import mask_tool
from schemas.models.constraints import Constraint
from schemas.sampling import Message, ToolSpec, Turn
from schemas.secrets.masking import Masks

MOST_CHOICES = 64
MOST_STOPS = 4
LONGEST_STOP = 256
LONGEST_MODEL = 128


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The part of a request that decides what is sampled.

    `instructions` are the system message, if the format has it apart from the messages. `previous` is
    the number of an earlier request of the sample (from 1), whose conversation comes before `messages`.
    `prompts` are texts or token ids to continue, in place of messages. `num_choices` is that of each.
    `pieces` requests the bytes of each token, and `likeliest` that many of the likeliest tokens in the
    place of each. `constraint` is what the answer is forced to be.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    instructions: str | None = None
    previous: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    pieces: bool = False
    likeliest: int | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    constraint: Constraint | None = None

    def mask(self, masks: Masks) -> "ModelRequest":
        """Return the request with the secrets masked, as it is sampled from and recorded."""
        if not masks:
            return self
        return replace(
            self,
            messages=tuple(mask_message(message, masks) for message in self.messages),
            tools=tuple(mask_tool(tool, masks) for tool in self.tools),
            instructions=self.instructions and masks.text(self.instructions),
            stop=tuple(masks.text(stop) for stop in self.stop),
            constraint=self.constraint and mask_constraint(self.constraint, masks),
        )


def mask_message(message: Message, masks: Masks) -> Message:
    """Return a message with the secrets masked in every text."""
    fields = ("content", "reasoning", "tool_call_id", "name")
    changes = {key: masks.text(text) for key in fields if (text := getattr(message, key))}
    calls = tuple(
        call.model_copy(
            update={key: masks.text(getattr(call, key)) for key in ("id", "name", "arguments")}
        )
        for call in message.tool_calls
    )
    return message.model_copy(update={**changes, "tool_calls": calls})


class AnswerStream(Protocol):
    """Writes an answer as server-sent events. `text` may be called for pieces of the content of a choice
    while it is sampled, and `end` writes everything that was not written yet."""

    keep_alive: bytes
    """An event that says nothing, for times in which nothing is sampled."""

    def text(self, choice: int, piece: str) -> Iterable[bytes]: ...

    def end(self, turns: Sequence[Turn]) -> Iterable[bytes]: ...

    def failure(self, error: GatewayError) -> bytes: ...


class WireRequest(Protocol):
    """A parsed request, which can write its answer. `number` is that of the request in its sample."""

    @property
    def streams(self) -> bool: ...

    @property
    def model_request(self) -> ModelRequest: ...

    def answer(self, turns: Sequence[Turn], *, number: int) -> bytes: ...

    def stream(self, *, number: int) -> AnswerStream: ...


@dataclass(frozen=True, slots=True)
class WireFormat:
    """A wire format: how its requests are parsed, and how it writes an error. `parse` raises
    GatewayError (400), which names the parameter and what is wrong. With `count`, a request asks only
    for the number of tokens of its prompt, which `count` writes."""

    parse: Callable[[bytes], WireRequest]
    failure: Callable[[GatewayError], bytes]
    count: Callable[[int], bytes] | None = None


def finish_of(turn: Turn) -> str:
    """Why an answer ended, in OpenAI's words."""
    calls_tools = turn.finish_reason == "stop" and turn.message.tool_calls
    return "tool_calls" if calls_tools else turn.finish_reason


def rest_of(told: str, text: str) -> str:
    """The part of a text that was not told yet. Nothing can be taken back, so a text that does not begin
    with what was told continues after the part that it shares."""
    if text.startswith(told):
        return text[len(told) :]
    shared = next(
        (n for n, (a, b) in enumerate(zip(told, text, strict=False)) if a != b), len(text)
    )
    return text[shared:]
