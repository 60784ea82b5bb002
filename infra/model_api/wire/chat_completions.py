"""OpenAI's Chat Completions: parses requests, and writes answers and chunks."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from infra.model_api.wire.constraints import choose_tools, format_schema, openai_choice
from infra.model_api.wire.errors import GatewayError, invalid, unsupported
from infra.model_api.wire.parameters import check_extra, field_names, invalid_request
from infra.model_api.wire.request import (
    LONGEST_MODEL,
    LONGEST_STOP,
    MOST_CHOICES,
    MOST_STOPS,
    ModelRequest,
    finish_of,
    rest_of,
)
from infra.model_api.wire.tools import check_tools, tool_spec
from schemas.models.constraints import Constraint
from schemas.models.openai_messages import openai_tool_call
from schemas.sampling import Message, ToolCall, ToolSpec, Turn

REFUSED: dict[str, str] = {
    "functions": "OpenAI has replaced it; use tools",
    "function_call": "OpenAI has replaced it; use tool_choice",
    "logit_bias": "the policy is sampled as it is; leave it out",
    "frequency_penalty": "the policy is sampled as it is; leave it out",
    "presence_penalty": "the policy is sampled as it is; leave it out",
    "repetition_penalty": "the policy is sampled as it is; leave it out",
    "modalities": "answers are plain text; leave it out",
    "audio": "answers are plain text; leave it out",
    "web_search_options": "not supported; leave it out",
    "chat_template_kwargs": "not supported; leave it out",
}
"""Parameters that are refused, and why. Null and the values in NOTHING are accepted."""

NOTHING: dict[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "modalities": (["text"],),
}

LABELS = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
        "store",
        "prediction",
        "parallel_tool_calls",
        "reasoning_effort",
        "verbosity",
        "cache_salt",
        "priority",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)
"""Parameters that do not concern what is sampled here. They are accepted with any value."""

MOST_CALLS = 128


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    name: str = Field(max_length=256)
    arguments: str | dict[str, Any] = ""


class WireToolCall(BaseModel):
    id: str = Field(default="", max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> ToolCall:
        arguments = self.function.arguments
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return ToolCall(id=self.id, name=self.function.name, arguments=text)


class WireMessage(BaseModel):
    """A message as clients send it. Its content is text or a list of text parts. Clients also send
    earlier answers back, with fields that are null."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[WireToolCall] | None = Field(default=None, max_length=MOST_CALLS)
    tool_call_id: str | None = Field(default=None, max_length=256)
    name: str | None = Field(default=None, max_length=256)

    def plain(self) -> Message:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        if self.role == "assistant":
            calls = tuple(call.plain() for call in self.tool_calls or ())
            return Message(
                role=self.role, content=text, reasoning=self.reasoning_content, tool_calls=calls
            )
        if self.role == "tool":
            return Message(
                role=self.role, content=text, tool_call_id=self.tool_call_id, name=self.name
            )
        return Message(role="system" if self.role == "developer" else self.role, content=text)


CARRIED = frozenset(
    {"refusal", "annotations", "reasoning", "cache_control", "provider_specific_fields"}
)
"""Fields of a message that are accepted but not passed to the chat template."""


class DefinedFunction(BaseModel):
    name: Any
    description: Any = None
    parameters: Any = None


class WireTool(BaseModel):
    """A tool that is offered. `strict` is accepted; arguments of a call that is not forced are what the
    policy writes."""

    type: str = "function"
    function: DefinedFunction | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = False


Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Stops = Annotated[
    list[Stop],
    Field(max_length=MOST_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
"""One stop string, or a list of them."""


class ChatRequest(BaseModel):
    """The part of a request that is obeyed."""

    model_config = ConfigDict(extra="allow")
    messages: Annotated[list[WireMessage], Field(min_length=1)]
    model: str | None = None
    tools: list[WireTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=1, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: Stops | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = False
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)

    def tools_and_constraint(self) -> tuple[tuple[ToolSpec, ...], Constraint | None]:
        """The tools that the policy may call, and what its answer is forced to be."""
        specs = check_tools([_tool(tool, number) for number, tool in enumerate(self.tools or ())])
        schema = format_schema("response_format", self.response_format)
        choice, name = openai_choice(self.tool_choice)
        return choose_tools(specs, choice, name=name, schema=schema)


KNOWN = field_names(
    ChatRequest, WireMessage, WireToolCall, CalledFunction, WireTool, DefinedFunction, TextPart
)
"""Field names that an error text may show as the location. Names of union members are left out."""


def _tool(tool: WireTool, number: int) -> ToolSpec:
    where = f"tools.{number}"
    if tool.type != "function" or tool.function is None:
        raise unsupported(where, "only tools of the type function are supported")
    function = tool.function
    return tool_spec(
        f"{where}.function",
        name=function.name,
        description=function.description,
        schema=function.parameters,
    )


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """A request for chat completions, and how its answer is written."""

    request: ChatRequest
    model_request: ModelRequest
    streams: bool

    @property
    def model(self) -> str:
        return (self.request.model or "policy")[:LONGEST_MODEL]

    def answer(self, turns: Sequence[Turn], *, number: int) -> bytes:
        """The answer as one JSON object, with a choice for each turn."""
        choices = [self._choice(index, turn) for index, turn in enumerate(turns)]
        body = self.head("chat.completion", number) | {"choices": choices, "usage": usage(turns)}
        if self.request.return_token_ids:
            body["prompt_token_ids"] = list(turns[0].prompt_ids)
        return json.dumps(body).encode()

    def _choice(self, index: int, turn: Turn) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "message": _message(turn.message),
            "finish_reason": finish_of(turn),
            "logprobs": _logprobs(turn) if self.request.logprobs else None,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = list(turn.completion_ids)
        return choice

    def stream(self, *, number: int) -> "ChatStream":
        return ChatStream(self, number)

    def head(self, kind: str, number: int) -> dict[str, object]:
        """The fields that an answer and all of its chunks have."""
        name = f"chatcmpl-{number}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.model}


def parse(body: bytes) -> ChatCompletion:
    """Parse a request body. Raises GatewayError (400), which names the parameter and what is wrong."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error, KNOWN) from error
    check_extra(request.model_extra, labels=LABELS, refused=REFUSED, nothing=NOTHING)
    for number, message in enumerate(request.messages):
        for name, value in (message.model_extra or {}).items():
            if name not in CARRIED and value not in (None, []):
                where = f"messages.{number}.{name[:64]}"
                raise unsupported(where, "a message has no such field here; leave it out")
        if message.tool_calls and message.role != "assistant":
            raise invalid(f"messages.{number}.tool_calls", "only the assistant calls tools")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs, which is not true; set it too")
    tools, constraint = request.tools_and_constraint()
    wanted = ModelRequest(
        messages=tuple(message.plain() for message in request.messages),
        tools=tools,
        constraint=constraint,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stop=tuple(request.stop or ()),
        num_choices=request.n or 1,
        pieces=bool(request.logprobs),
        likeliest=request.top_logprobs or None,
    )
    return ChatCompletion(request, wanted, bool(request.stream))


@dataclass(slots=True)
class ChatStream:
    """The chunks of an answer: role, reasoning, text and calls of each choice, finish reasons, usage,
    then [DONE]."""

    of: ChatCompletion
    number: int
    keep_alive: bytes = b": keep-alive\n\n"
    _told: dict[int, str] = field(default_factory=dict)

    def text(self, choice: int, piece: str) -> Iterator[bytes]:
        """Write a piece of the content of a choice."""
        yield from self._begin(choice)
        self._told[choice] += piece
        yield self._chunk(choice, {"content": piece})

    def end(self, turns: Sequence[Turn]) -> Iterator[bytes]:
        """Write what was not written yet."""
        for choice, turn in enumerate(turns):
            yield from self._begin(choice)
            yield from self._rest(choice, turn)
            yield self._chunk(choice, {}, finish=finish_of(turn))
        options = self.of.request.stream_options
        if options and options.include_usage:
            yield _event(self._head() | {"choices": [], "usage": usage(turns)})
        yield b"data: [DONE]\n\n"

    def failure(self, error: GatewayError) -> bytes:
        return b"data: " + failure(error) + b"\n\n"

    def _begin(self, choice: int) -> Iterator[bytes]:
        if choice not in self._told:
            self._told[choice] = ""
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def _rest(self, choice: int, turn: Turn) -> Iterator[bytes]:
        message, request = turn.message, self.of.request
        if message.reasoning:
            yield self._chunk(choice, {"reasoning_content": message.reasoning})
        rest = rest_of(self._told[choice], message.content)
        logprobs = _logprobs(turn) if request.logprobs else None
        if rest or logprobs:
            yield self._chunk(choice, {"content": rest}, logprobs=logprobs)
        for index, call in enumerate(message.tool_calls):
            begun = openai_tool_call(call.model_copy(update={"arguments": ""}))
            yield self._chunk(choice, {"tool_calls": [{"index": index, **begun}]})
            written = {"index": index, "function": {"arguments": call.arguments}}
            yield self._chunk(choice, {"tool_calls": [written]})

    def _head(self) -> dict[str, object]:
        return self.of.head("chat.completion.chunk", self.number)

    def _chunk(
        self,
        choice: int,
        delta: dict[str, object],
        *,
        finish: str | None = None,
        logprobs: object = None,
    ) -> bytes:
        said = {"index": choice, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return _event(self._head() | {"choices": [said]})


def failure(error: GatewayError) -> bytes:
    """The error as OpenAI's error object, in JSON."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    said = {"message": error.message, "type": kind, "code": error.code, "param": error.parameter}
    return json.dumps({"error": said}).encode()


def usage(turns: Sequence[Turn]) -> dict[str, int]:
    """The tokens of an answer. Its choices have one prompt."""
    prompt = turns[0].counts.prompt_tokens
    completion = sum(turn.counts.completion_tokens for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _message(message: Message) -> dict[str, object]:
    """An answer. One that only calls tools has no content."""
    said: dict[str, object] = {
        "role": "assistant",
        "content": message.content or (None if message.tool_calls else ""),
    }
    if message.reasoning:
        said["reasoning_content"] = message.reasoning
    if message.tool_calls:
        said["tool_calls"] = [openai_tool_call(call) for call in message.tool_calls]
    return said


def _logprobs(turn: Turn) -> dict[str, object]:
    """For each token of the text: its string (a part of a character becomes a replacement character),
    its bytes, the logprob with which it was sampled, and the likeliest tokens in its place. The token
    that ended the turn is left out."""
    pieces = turn.pieces or ()
    likeliest = turn.likeliest or ((),) * len(pieces)
    tokens = [
        {**_token(piece, logprob), "top_logprobs": [_token(t.piece, t.logprob) for t in likely]}
        for piece, logprob, likely in zip(pieces, turn.logprobs, likeliest, strict=False)
        if piece is not None
    ]
    return {"content": tokens, "refusal": None}


def _token(piece: tuple[int, ...], logprob: float) -> dict[str, object]:
    text = bytes(piece).decode(errors="replace")
    return {"token": text, "logprob": logprob, "bytes": list(piece)}


def _event(body: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
