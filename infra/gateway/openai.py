"""The JSON of OpenAI's chat completions: parses requests, and makes answers and chunks. It does no
IO."""

import json
import time
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from infra.gateway.sessions import GatewayError
from schemas.sampling import Message, Turn

MOST_STOPS = 4
LONGEST_STOP = 256
UNSUPPORTED: dict[str, str] = {
    "seed": "draws are keyed by the run's seed and the sample's place in the run, so that a run can be "
    "repeated; leave it out",
    "top_logprobs": "only the logprob of the token that was drawn is kept; leave it out",
    "tools": "not built in this version; describe tools in the prompt",
    "functions": "not built in this version; describe tools in the prompt",
    "tool_choice": "not built in this version; leave it out",
    "function_call": "not built in this version; leave it out",
    "parallel_tool_calls": "not built in this version; leave it out",
    "logit_bias": "the policy is sampled as it is; leave it out",
    "frequency_penalty": "the policy is sampled as it is; leave it out",
    "presence_penalty": "the policy is sampled as it is; leave it out",
    "response_format": "answers are plain text; ask for the format in the prompt",
    "modalities": "answers are plain text; leave it out",
    "audio": "answers are plain text; leave it out",
    "prediction": "not supported; leave it out",
    "reasoning_effort": "not supported; ask for it in the prompt",
    "verbosity": "not supported; ask for it in the prompt",
    "web_search_options": "not supported; leave it out",
    "store": "nothing is stored beside the run's own record; leave it out",
}
"""OpenAI's parameters that are refused, and why. Null and the values in NOTHING are accepted."""

NOTHING: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "top_logprobs": (0,),
}
"""Values of refused parameters that do not change an answer, and so are accepted."""

LABELS = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "model"}
)
"""Parameters that do not concern the answer. They are accepted with any value."""


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class WireMessage(BaseModel):
    """A message as clients send it. Its content is text or a list of text parts. Clients also send
    earlier answers back, with fields that are null."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None

    def plain(self) -> Message:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return Message(role="system" if self.role == "developer" else self.role, content=text)


CARRIED = frozenset({"name", "tool_call_id", "refusal", "annotations", "reasoning_content"})
"""Fields of a message that are accepted but not passed to the chat template."""


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
    """The supported part of a request. The run's own temperature and top_p always apply, because the
    recorded logprobs must be those of the policy that is trained. Every other parameter is either
    obeyed or refused by name."""

    model_config = ConfigDict(extra="allow")
    messages: Annotated[list[WireMessage], Field(min_length=1)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: Stops | None = None
    logprobs: bool | None = False
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings at which the answer ends."""
        return tuple(self.stop or ())


def parse(body: bytes) -> ChatRequest:
    """Parse a request body. Raises GatewayError (400), which names the parameter and what is wrong."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"] if part in KNOWN or type(part) is int)
        name = str(first["loc"][0]) if first["loc"] else None
        raise GatewayError(
            400, "invalid_request", f"{where or 'the body'}: {first['msg']}", parameter=name
        ) from error
    if request.n not in (None, 1):
        text = f"n: must be 1, got {request.n}; send one request per completion"
        raise GatewayError(400, "unsupported_parameter", text, parameter="n")
    for name, value in (request.model_extra or {}).items():
        _refuse_extra(name, value)
    for number, message in enumerate(request.messages):
        for name, value in (message.model_extra or {}).items():
            if name not in CARRIED and value not in (None, []):
                where = f"messages.{number}.{name[:64]}"
                text = f"{where}: a message may only have a role and text; leave it out"
                raise GatewayError(400, "unsupported_parameter", text, parameter=where)
    return request


def _refuse_extra(name: str, value: object) -> None:
    """Raise GatewayError unless a parameter changes nothing, or does not concern the answer."""
    if name in LABELS or (
        name in UNSUPPORTED and (value is None or value in NOTHING.get(name, ()))
    ):
        return
    if name in UNSUPPORTED:
        text = f"{name}: {UNSUPPORTED[name]}"
        raise GatewayError(400, "unsupported_parameter", text, parameter=name)
    text = f"{name[:64]}: unknown parameter; leave it out"
    raise GatewayError(400, "unknown_parameter", text, parameter=name[:64])


KNOWN = frozenset({*ChatRequest.model_fields, *WireMessage.model_fields, "text", "type"})
"""Field names that an error text may show as the location. Names of union members are left out."""


def answer(turn: Turn, request: ChatRequest, *, request_id: str) -> bytes:
    """The answer as one JSON object."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": turn.text},
        "finish_reason": turn.finish_reason,
        "logprobs": _logprobs(turn) if request.logprobs else None,
    }
    body = {**_head("chat.completion", request_id), "choices": [choice], "usage": usage(turn)}
    return json.dumps(body).encode()


def chunks(turn: Turn, request: ChatRequest, *, request_id: str) -> Iterator[bytes]:
    """The answer as server-sent events: role, text, finish reason, then [DONE]."""
    head = _head("chat.completion.chunk", request_id)
    steps: list[tuple[dict[str, str], str | None, dict[str, object] | None]] = [
        ({"role": "assistant", "content": ""}, None, None),
        ({"content": turn.text}, None, _logprobs(turn) if request.logprobs else None),
        ({}, turn.finish_reason, None),
    ]
    for delta, reason, logprobs in steps:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        yield _event({**head, "choices": [choice]})
    if request.stream_options and request.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": usage(turn)})
    yield b"data: [DONE]\n\n"


def failure(error: GatewayError) -> bytes:
    """The error as OpenAI's error object, in JSON."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    said = {"message": error.message, "type": kind, "code": error.code, "param": error.parameter}
    return json.dumps({"error": said}).encode()


def usage(turn: Turn) -> dict[str, int]:
    prompt, completion = turn.counts.prompt_tokens, turn.counts.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _head(kind: str, request_id: str) -> dict[str, object]:
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": "policy"}


def _logprobs(turn: Turn) -> dict[str, object]:
    """For each token of the text: its string (a part of a character becomes a replacement character),
    its bytes, and the logprob with which it was sampled. The token that ended the turn is left out."""
    tokens: list[dict[str, object]] = [
        {
            "token": bytes(piece).decode(errors="replace"),
            "logprob": logprob,
            "bytes": list(piece),
            "top_logprobs": [],
        }
        for piece, logprob in zip(turn.pieces or (), turn.logprobs, strict=False)
        if piece is not None
    ]
    return {"content": tokens, "refusal": None}


def _event(body: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
