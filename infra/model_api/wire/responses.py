"""OpenAI's Responses API: writes answers, and the events of a stream."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.model_api.wire.errors import GatewayError
from infra.model_api.wire.request import LONGEST_MODEL, ModelRequest, rest_of
from infra.model_api.wire.responses_request import (
    ResponsesRequest,
    messages_of,
    parse_request,
    tools_and_constraint,
)
from schemas.sampling import Turn

PREFIX = "resp_"

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Responses:
    """A request for a response, and how its answer is written."""

    request: ResponsesRequest
    model_request: ModelRequest
    streams: bool

    def answer(self, turns: Sequence[Turn], *, number: int) -> bytes:
        """The response as one JSON object."""
        return json.dumps(self.response(number, turns[0])).encode()

    def stream(self, *, number: int) -> "ResponseStream":
        return ResponseStream(self, number)

    def response(self, number: int, turn: Turn | None) -> dict[str, object]:
        """The response object; without a turn, as it is at the beginning of a stream."""
        request = self.request
        is_cut = turn is not None and turn.finish_reason == "length"
        ended = "incomplete" if is_cut else "completed"
        extra: dict[str, Any] = request.model_extra or {}
        return {
            "id": f"{PREFIX}{number}",
            "object": "response",
            "created_at": int(time.time()),
            "status": ended if turn else "in_progress",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": extra.get("metadata") or {},
            "model": (request.model or "policy")[:LONGEST_MODEL],
            "output": items_of(turn, number) if turn else [],
            "parallel_tool_calls": True,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": None,
            "text": {"format": (request.text.format if request.text else None) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": None,
            "truncation": "disabled",
            "usage": usage(turn) if turn else None,
        }


def parse(body: bytes) -> Responses:
    """Parse a request body. Raises GatewayError (400), which names the parameter and what is wrong."""
    request = parse_request(body)
    tools, constraint = tools_and_constraint(request)
    model_request = ModelRequest(
        messages=messages_of(request.input),
        tools=tools,
        constraint=constraint,
        instructions=request.instructions,
        previous=_number(request.previous_response_id),
        max_tokens=request.max_output_tokens,
    )
    return Responses(request, model_request, bool(request.stream))


def _number(response: str | None) -> int | None:
    """The number of the request that a response id names; 0 if it is not one of ours."""
    if response is None:
        return None
    digits = response.removeprefix(PREFIX)
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 9 else 0


def usage(turn: Turn) -> dict[str, object]:
    """The tokens of an answer."""
    counts = turn.counts
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }


def items_of(turn: Turn, number: int) -> list[Item]:
    """The output items of an answer: reasoning, a message unless it only calls tools, and calls."""
    message, status = turn.message, "incomplete" if turn.finish_reason == "length" else "completed"
    items: list[Item] = []
    if message.reasoning:
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content})
    if message.content or not message.tool_calls:
        items.append(_message_item(number, message.content, status=status))
    for place, call in enumerate(message.tool_calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{number}_{place}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": status,
            }
        )
    return items


def _message_item(number: int, text: str | None, *, status: str) -> Item:
    content = [] if text is None else [_text_part(text)]
    return {
        "type": "message",
        "id": f"msg_{number}",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _text_part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


@dataclass(slots=True)
class ResponseStream:
    """The events of a response, in the order of OpenAI's API."""

    of: Responses
    number: int
    keep_alive: bytes = b": keep-alive\n\n"
    _told: str | None = None
    _sequence: int = -1
    _items: list[Item] = field(default_factory=list)

    def text(self, choice: int, piece: str) -> Iterator[bytes]:
        """Write a piece of the message."""
        yield from self._begin()
        if self._told is None:
            yield from self._begin_message()
        self._told = (self._told or "") + piece
        yield self._text_delta(piece)

    def end(self, turns: Sequence[Turn]) -> Iterator[bytes]:
        """Write what was not written yet."""
        [turn] = turns
        yield from self._begin()
        items = items_of(turn, self.number)
        if self._told is not None:  # the message began before anything else was known
            items.sort(key=lambda item: item["type"] != "message")
            if items[0]["type"] != "message":
                items.insert(
                    0, _message_item(self.number, turn.message.content, status="completed")
                )
        for item in items:
            yield from self._write_item(item)
        response = self.of.response(self.number, turn) | {"output": self._items}
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: GatewayError) -> bytes:
        """An error, after the stream has begun."""
        return self._event("error", code=error.code, message=error.message, param=error.parameter)

    def _begin(self) -> Iterator[bytes]:
        if self._sequence < 0:
            response = self.of.response(self.number, None)
            yield self._event("response.created", response=response)
            yield self._event("response.in_progress", response=response)

    def _write_item(self, item: Item) -> Iterator[bytes]:
        match item["type"]:
            case "message":
                yield from self._write_message(item)
            case "function_call":
                yield from self._write_call(item)
            case _:
                yield from self._write_reasoning(item)
        self._items.append(item)

    def _begin_message(self) -> Iterator[bytes]:
        begun = _message_item(self.number, None, status="in_progress")
        yield self._event("response.output_item.added", item=begun, output_index=len(self._items))
        yield self._part_event("response.content_part.added", _text_part(""))

    def _write_message(self, item: Item) -> Iterator[bytes]:
        if self._told is None:
            yield from self._begin_message()
        text: str = item["content"][0]["text"]
        if rest := rest_of(self._told or "", text):
            yield self._text_delta(rest)
        place = self._place(item["id"])
        yield self._event("response.output_text.done", text=text, logprobs=[], **place)
        yield self._part_event("response.content_part.done", item["content"][0])
        yield self._end_item(item)

    def _write_call(self, item: Item) -> Iterator[bytes]:
        index, name = len(self._items), item["id"]
        begun = item | {"arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", item=begun, output_index=index)
        kind = "response.function_call_arguments"
        arguments = item["arguments"]
        yield self._event(f"{kind}.delta", item_id=name, output_index=index, delta=arguments)
        yield self._event(
            f"{kind}.done",
            item_id=name,
            output_index=index,
            name=item["name"],
            arguments=arguments,
        )
        yield self._end_item(item)

    def _write_reasoning(self, item: Item) -> Iterator[bytes]:
        begun = item | {"content": []}
        text = item["content"][0]["text"]
        place = self._place(item["id"])
        yield self._event("response.output_item.added", item=begun, output_index=len(self._items))
        yield self._event("response.reasoning_text.delta", delta=text, **place)
        yield self._event("response.reasoning_text.done", text=text, **place)
        yield self._end_item(item)

    def _end_item(self, item: Item) -> bytes:
        return self._event("response.output_item.done", item=item, output_index=len(self._items))

    def _text_delta(self, piece: str) -> bytes:
        place = self._place(f"msg_{self.number}")
        return self._event("response.output_text.delta", delta=piece, logprobs=[], **place)

    def _part_event(self, kind: str, part: dict[str, object]) -> bytes:
        return self._event(kind, part=part, **self._place(f"msg_{self.number}"))

    def _place(self, item: str) -> dict[str, object]:
        return {"item_id": item, "output_index": len(self._items), "content_index": 0}

    def _event(self, kind: str, **said: object) -> bytes:
        self._sequence += 1
        body = {"type": kind, "sequence_number": self._sequence, **said}
        return f"event: {kind}\ndata: {json.dumps(body)}\n\n".encode()
