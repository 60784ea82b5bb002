"""Anthropic's Messages API: writes answers, the events of a stream, and errors."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from infra.model_api.wire.anthropic_request import (
    MessagesRequest,
    input_of,
    instructions_of,
    messages_of,
    parse_request,
    tools_and_constraint,
)
from infra.model_api.wire.errors import GatewayError, invalid
from infra.model_api.wire.request import LONGEST_MODEL, ModelRequest, rest_of
from schemas.sampling import Turn

Block = dict[str, Any]

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""The type of an error, by its status. All others are api_error."""


@dataclass(frozen=True, slots=True)
class AnthropicMessages:
    """A request for a message, and how its answer is written."""

    request: MessagesRequest
    model_request: ModelRequest
    streams: bool

    def answer(self, turns: Sequence[Turn], *, number: int) -> bytes:
        """The message as one JSON object."""
        [turn] = turns
        message = self.head(number) | {
            "content": blocks_of(turn),
            "stop_reason": stop_reason(turn),
            "usage": usage(turn),
        }
        return json.dumps(message).encode()

    def stream(self, *, number: int) -> "MessageStream":
        return MessageStream(self, number)

    def head(self, number: int) -> dict[str, object]:
        """The message before anything of it is known."""
        return {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "model": (self.request.model or "policy")[:LONGEST_MODEL],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }


def parse(body: bytes) -> AnthropicMessages:
    """Parse a request for a message. Raises GatewayError (400)."""
    made = parse_count(body)
    if made.request.max_tokens is None:
        raise invalid("max_tokens", "there is none; say how long the answer may be")
    return made


def parse_count(body: bytes) -> AnthropicMessages:
    """Parse a request to count tokens. Raises GatewayError (400)."""
    request = parse_request(body)
    tools, constraint = tools_and_constraint(request)
    model_request = ModelRequest(
        messages=messages_of(request.messages),
        tools=tools,
        constraint=constraint,
        instructions=instructions_of(request.system),
        max_tokens=request.max_tokens,
        stop=tuple(request.stop_sequences or ()),
    )
    return AnthropicMessages(request, model_request, bool(request.stream))


def count(num_tokens: int) -> bytes:
    """The answer to a request to count tokens."""
    return json.dumps({"input_tokens": num_tokens}).encode()


def failure(error: GatewayError) -> bytes:
    """The error as Anthropic's error object, in JSON."""
    return json.dumps(_error(error)).encode()


def _error(error: GatewayError) -> dict[str, object]:
    said = {"type": KINDS.get(error.status, "api_error"), "message": error.message}
    return {"type": "error", "error": said, "request_id": None}


def stop_reason(turn: Turn) -> str:
    """Why an answer ended. The end at a stop sequence is the end of a turn here."""
    if turn.finish_reason == "length":
        return "max_tokens"
    return "tool_use" if turn.message.tool_calls else "end_turn"


def usage(turn: Turn) -> dict[str, int]:
    """The tokens of an answer."""
    return {
        "input_tokens": turn.counts.prompt_tokens,
        "output_tokens": turn.counts.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def blocks_of(turn: Turn) -> list[Block]:
    """The content of an answer: thinking, a text unless it only calls tools, and calls."""
    message, blocks = turn.message, list[Block]()
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": input_of(call)}
        )
    return blocks


@dataclass(slots=True)
class MessageStream:
    """The events of a message, in the order of Anthropic's API."""

    of: AnthropicMessages
    number: int
    keep_alive: bytes = b'event: ping\ndata: {"type": "ping"}\n\n'
    _is_begun: bool = False
    _told: str | None = None
    _num_blocks: int = 0

    def text(self, choice: int, piece: str) -> Iterator[bytes]:
        """Write a piece of the text."""
        yield from self._begin(None)
        if self._told is None:
            self._told = ""
            yield self._start_block({"type": "text", "text": ""})
        self._told += piece
        yield self._delta({"type": "text_delta", "text": piece})

    def end(self, turns: Sequence[Turn]) -> Iterator[bytes]:
        """Write what was not written yet."""
        [turn] = turns
        yield from self._begin(turn)
        blocks = blocks_of(turn)
        if self._told is not None:  # the text began before anything else was known
            rest = rest_of(self._told, turn.message.content)
            if rest:
                yield self._delta({"type": "text_delta", "text": rest})
            yield self._stop_block()
            blocks = [block for block in blocks if block["type"] != "text"]
        for block in blocks:
            yield from self._write_block(block)
        ended = {"stop_reason": stop_reason(turn), "stop_sequence": None}
        yield _event("message_delta", delta=ended, usage=usage(turn))
        yield _event("message_stop")

    def failure(self, error: GatewayError) -> bytes:
        """An error, after the stream has begun."""
        return b"event: error\ndata: " + failure(error) + b"\n\n"

    def _begin(self, turn: Turn | None) -> Iterator[bytes]:
        if not self._is_begun:
            self._is_begun = True
            message = self.of.head(self.number)
            if turn is not None:
                message["usage"] = usage(turn) | {"output_tokens": 1}
            yield _event("message_start", message=message)

    def _write_block(self, block: Block) -> Iterator[bytes]:
        match block["type"]:
            case "text":
                yield self._start_block({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": block["text"]})
            case "thinking":
                yield self._start_block({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": block["thinking"]})
            case _:
                yield self._start_block(block | {"input": {}})
                written = json.dumps(block["input"], ensure_ascii=False)
                yield self._delta({"type": "input_json_delta", "partial_json": written})
        yield self._stop_block()

    def _start_block(self, block: Block) -> bytes:
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _stop_block(self) -> bytes:
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)


def _event(kind: str, **said: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **said})}\n\n".encode()
