"""Requests of OpenAI's Responses API: input items become messages.

A turn of the policy is several items: reasoning, a message, and calls. Items of one turn that follow one
another become one message again.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.model_api.wire.constraints import choose_tools, format_schema, openai_choice
from infra.model_api.wire.errors import GatewayError, invalid, unsupported
from infra.model_api.wire.parameters import check_extra, field_names, invalid_request
from infra.model_api.wire.tools import check_tools, tool_spec
from schemas.models.constraints import Constraint
from schemas.sampling import Message, ToolCall, ToolSpec

REFUSED: dict[str, str] = {
    "background": "an answer is sampled while its request waits; leave it out",
    "conversation": "nothing is stored beside the run's own record; send the whole input",
    "context_management": "not supported; leave it out",
    "prompt": "there are no stored prompts; send instructions and input",
    "top_logprobs": "only the logprob of the token that was drawn is kept; leave it out",
    "max_tool_calls": "not supported; leave it out",
}
"""Parameters that are refused, and why. Null and the values in NOTHING are accepted."""

NOTHING: dict[str, tuple[object, ...]] = {"background": (False,), "top_logprobs": (0,)}

LABELS = frozenset(
    {
        "include",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "truncation",
        "user",
    }
)
"""Parameters that do not concern what is sampled here. They are accepted with any value."""

TEXTS = frozenset(
    {"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"}
)
MOST_ITEMS = 8192


class InputItem(BaseModel):
    """An item of the input. Which fields it has follows from its type."""

    model_config = ConfigDict(extra="ignore")
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    call_id: str | None = Field(default=None, max_length=256)
    name: str | None = Field(default=None, max_length=256)
    arguments: str = ""
    output: str | list[dict[str, Any]] | None = None


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    format: dict[str, Any] | None = None


class ResponsesRequest(BaseModel):
    """The part of a request that is obeyed."""

    model_config = ConfigDict(extra="allow")
    input: str | Annotated[list[InputItem], Field(max_length=MOST_ITEMS)] = []
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextOptions | None = None
    stream: bool | None = False
    previous_response_id: str | None = Field(default=None, max_length=128)
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)


KNOWN = field_names(ResponsesRequest, InputItem, TextOptions)


def parse_request(body: bytes) -> ResponsesRequest:
    """Parse a request body. Raises GatewayError (400), which names the parameter and what is wrong."""
    try:
        request = ResponsesRequest.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error, KNOWN) from error
    check_extra(request.model_extra, labels=LABELS, refused=REFUSED, nothing=NOTHING)
    if not request.input and request.previous_response_id is None:
        raise invalid("input", "there is none; send a text or items")
    return request


def tools_and_constraint(
    request: ResponsesRequest,
) -> tuple[tuple[ToolSpec, ...], Constraint | None]:
    """Return the functions that the policy may call, and what its answer is forced to be. Raises
    GatewayError for tools that a provider would run."""
    specs = []
    for number, tool in enumerate(request.tools or ()):
        where = f"tools.{number}"
        if tool.get("type") != "function":
            kind = str(tool.get("type"))[:64]
            raise unsupported(where, f"{kind} tools are not supported; only functions are")
        name, description = tool.get("name"), tool.get("description")
        schema = tool.get("parameters")
        specs.append(tool_spec(where, name=name, description=description, schema=schema))
    schema = format_schema("text.format", request.text.format if request.text else None)
    choice, name = openai_choice(request.tool_choice)
    return choose_tools(check_tools(specs), choice, name=name, schema=schema)


def messages_of(items: str | Sequence[InputItem]) -> tuple[Message, ...]:
    """Return the input as messages. Raises GatewayError for items that are not supported."""
    if isinstance(items, str):
        return (Message(role="user", content=items),)
    made: list[Message] = []
    turn = _Turn()
    for number, item in enumerate(items):
        where = f"input.{number}"
        if item.type == "reasoning" or item.type == "function_call" or item.role == "assistant":
            turn = turn.with_item(item, where, made)
            continue
        made += turn.messages()
        turn = _Turn()
        made.append(_input_message(item, where))
    return (*made, *turn.messages())


class _Turn:
    """The items of one turn of the policy, as far as they were read."""

    def __init__(self) -> None:
        self._content: str | None = None
        self._reasoning: str | None = None
        self._calls: list[ToolCall] = []

    def with_item(self, item: InputItem, where: str, made: list[Message]) -> "_Turn":
        """Return the turn that an item belongs to: this one, or the next if this one is complete. A
        complete turn is added to `made`."""
        ends = self._content is not None or self._calls
        if ends and item.type != "function_call":
            made += self.messages()
            return _Turn().with_item(item, where, made)
        if item.type == "reasoning":
            self._reasoning = _text(item.content, where) or _text(item.summary, where) or None
        elif item.type == "function_call":
            if item.name is None:
                raise invalid(f"{where}.name", "a call needs the name of its function")
            self._calls.append(
                ToolCall(id=item.call_id or "", name=item.name, arguments=item.arguments)
            )
        else:
            self._content = _text(item.content, where)
        return self

    def messages(self) -> list[Message]:
        """Return the turn as a message; none if it has no items."""
        if self._content is None and not self._calls:
            return []
        return [
            Message(
                role="assistant",
                content=self._content or "",
                reasoning=self._reasoning,
                tool_calls=tuple(self._calls),
            )
        ]


def _input_message(item: InputItem, where: str) -> Message:
    """Return an item that is not from the policy as a message."""
    if item.type == "function_call_output":
        content = _text(item.output, f"{where}.output")
        return Message(role="tool", content=content, tool_call_id=item.call_id)
    if item.type != "message" or item.role is None:
        kind = item.type[:64]
        text = f"items of the type {kind} are not supported; send messages, calls and their outputs"
        raise GatewayError(400, "unsupported_parameter", f"{where}: {text}", parameter=where)
    role = "system" if item.role == "developer" else item.role
    return Message(role=role, content=_text(item.content, f"{where}.content"))


def _text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    """Return the text of a content. Raises GatewayError for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type")
        found = part.get("refusal" if kind == "refusal" else "text")
        if kind not in TEXTS or not isinstance(found, str):
            shown = json.dumps(kind)[:64]
            raise unsupported(f"{where}.{number}", f"parts of the type {shown} are not supported")
        texts.append(found)
    return "".join(texts)
