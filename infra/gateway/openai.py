"""OpenAI's chat completions on the wire: requests in, answers and chunks out. Pure."""

import json
import time
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.gateway.sessions import GatewayError
from schemas.sampling import Message, Turn


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class WireMessage(BaseModel):
    """A message as clients send it: content is text, or parts of text."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None

    def plain(self) -> Message:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return Message(role="system" if self.role == "developer" else self.role, content=text)


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """What of a request matters. The run's own temperature and top_p always win: the recorded
    logprobs are those of the policy that is trained."""

    model_config = ConfigDict(extra="ignore")
    messages: Annotated[list[WireMessage], Field(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[object] | None = None
    logprobs: bool | None = False

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def parse(body: bytes) -> ChatRequest:
    """A request body. Raises GatewayError (400) with what is wrong."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise GatewayError(400, "invalid_request", f"{where}: {first['msg']}") from error
    if request.n not in (None, 1):
        raise GatewayError(400, "invalid_request", "n: one completion per request; ask again")
    if request.tools:
        raise GatewayError(
            400, "unsupported", "tools: not built in this version; describe tools in the prompt"
        )
    return request


def answer(turn: Turn, request: ChatRequest, *, request_id: str) -> bytes:
    """The whole answer as one JSON object."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": turn.text},
        "finish_reason": turn.finish_reason,
        "logprobs": _logprobs(turn) if request.logprobs else None,
    }
    body = {**_head("chat.completion", request_id), "choices": [choice], "usage": usage(turn)}
    return json.dumps(body).encode()


def chunks(turn: Turn, request: ChatRequest, *, request_id: str) -> Iterator[bytes]:
    """The answer as server-sent events: the role, the text, the reason, then [DONE]."""
    head = _head("chat.completion.chunk", request_id)
    steps: list[tuple[dict[str, str], str | None]] = [
        ({"role": "assistant", "content": ""}, None),
        ({"content": turn.text}, None),
        ({}, turn.finish_reason),
    ]
    for delta, reason in steps:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        yield _event({**head, "choices": [choice]})
    if request.stream_options and request.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": usage(turn)})
    yield b"data: [DONE]\n\n"


def failure(error: GatewayError) -> bytes:
    """OpenAI's error object."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body = {"error": {"message": error.message, "type": kind, "code": error.code, "param": None}}
    return json.dumps(body).encode()


def usage(turn: Turn) -> dict[str, int]:
    prompt, completion = len(turn.prompt_ids), len(turn.completion_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _head(kind: str, request_id: str) -> dict[str, object]:
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": "policy"}


def _logprobs(turn: Turn) -> dict[str, object]:
    tokens: list[dict[str, object]] = [
        {"token": str(token), "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(turn.completion_ids, turn.logprobs, strict=True)
    ]
    return {"content": tokens, "refusal": None}


def _event(body: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
