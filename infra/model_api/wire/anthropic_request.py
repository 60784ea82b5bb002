"""Requests of Anthropic's Messages API: content blocks become messages.

A result of a tool is a block of a user's message there, and a message of its own here.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.model_api.wire.constraints import anthropic_choice, choose_tools, format_schema
from infra.model_api.wire.errors import invalid, unsupported
from infra.model_api.wire.parameters import check_extra, field_names, invalid_request
from infra.model_api.wire.request import LONGEST_STOP, MOST_STOPS
from infra.model_api.wire.tools import check_tools, tool_spec
from schemas.models.constraints import Constraint
from schemas.sampling import Message, ToolCall, ToolSpec

REFUSED: dict[str, str] = {
    "container": "not supported; leave it out",
    "mcp_servers": "not supported; connect to them in the workflow",
    "context_management": "not supported; leave it out",
}
"""Parameters that are refused, and why. Null and the values in NOTHING are accepted."""

NOTHING: dict[str, tuple[object, ...]] = {"mcp_servers": ([],)}

LABELS = frozenset(
    {"metadata", "service_tier", "thinking", "cache_control", "inference_geo", "betas"}
)
"""Parameters that do not concern what is sampled here. They are accepted with any value."""

INVALID_ARGUMENTS = "invalid_arguments"
"""The only key of the input of a call whose arguments are not a JSON object. Its value is their text."""

Blocks = str | list[dict[str, Any]]


class MessageParam(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: Literal["user", "assistant", "system"]
    content: Blocks


class OutputConfig(BaseModel):
    """How an answer is written. `effort` is accepted."""

    model_config = ConfigDict(extra="ignore")
    format: dict[str, Any] | None = None


class MessagesRequest(BaseModel):
    """The part of a request that is obeyed. To count tokens, `max_tokens` is not needed."""

    model_config = ConfigDict(extra="allow")
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]],
            Field(max_length=MOST_STOPS),
        ]
        | None
    ) = None
    stream: bool | None = False
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)


KNOWN = field_names(MessagesRequest, MessageParam, OutputConfig)


def parse_request(body: bytes) -> MessagesRequest:
    """Parse a request body. Raises GatewayError (400), which names the parameter and what is wrong."""
    try:
        request = MessagesRequest.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error, KNOWN) from error
    check_extra(request.model_extra, labels=LABELS, refused=REFUSED, nothing=NOTHING)
    return request


def tools_and_constraint(
    request: MessagesRequest,
) -> tuple[tuple[ToolSpec, ...], Constraint | None]:
    """Return the tools that the policy may call, and what its answer is forced to be. Raises
    GatewayError for tools that a provider would run."""
    specs = []
    for number, tool in enumerate(request.tools or ()):
        where = f"tools.{number}"
        if tool.get("type") not in (None, "custom"):
            kind = str(tool.get("type"))[:64]
            raise unsupported(where, f"{kind} tools are not supported; define tools of your own")
        name, description = tool.get("name"), tool.get("description")
        schema = tool.get("input_schema")
        specs.append(tool_spec(where, name=name, description=description, schema=schema))
    config = request.output_config
    schema = format_schema("output_format", request.output_format) or (
        format_schema("output_config.format", config.format) if config else None
    )
    choice, name = anthropic_choice(request.tool_choice)
    return choose_tools(check_tools(specs), choice, name=name, schema=schema)


def instructions_of(system: Blocks | None) -> str | None:
    """Return the system prompt as text."""
    return None if system is None else "\n".join(_texts(system, "system")) or None


def messages_of(params: Sequence[MessageParam]) -> tuple[Message, ...]:
    """Return the messages of a request. Raises GatewayError for blocks that are not supported."""
    made: list[Message] = []
    for number, param in enumerate(params):
        where = f"messages.{number}.content"
        if param.role == "assistant":
            made.append(_assistant_message(param.content, where))
        else:
            made += _user_messages(param.role, param.content, where)
    return tuple(made)


def _assistant_message(content: Blocks, where: str) -> Message:
    if isinstance(content, str):
        return Message(role="assistant", content=content)
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(content):
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", f"{where}.{number}"))
            case "thinking":
                thoughts.append(_string(block, "thinking", f"{where}.{number}"))
            case "tool_use":
                calls.append(_call(block, f"{where}.{number}"))
            case "redacted_thinking":
                pass
            case kind:
                raise _unknown_block(kind, f"{where}.{number}")
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning="".join(thoughts) or None,
        tool_calls=tuple(calls),
    )


def _call(block: dict[str, Any], where: str) -> ToolCall:
    given = block.get("input", {})
    name, call = _string(block, "name", where), _string(block, "id", where)
    if isinstance(given, dict) and list(given) == [INVALID_ARGUMENTS]:
        arguments = str(given[INVALID_ARGUMENTS])
    else:
        arguments = json.dumps(given, ensure_ascii=False)
    return ToolCall(id=call, name=name, arguments=arguments)


def input_of(call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call as the input of a block, which must be an object."""
    try:
        found = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {INVALID_ARGUMENTS: call.arguments}


def _user_messages(
    role: Literal["user", "system"], content: Blocks, where: str
) -> Iterator[Message]:
    """The results of tools in a message, and the texts between them, in their order."""
    if isinstance(content, str):
        yield Message(role=role, content=content)
        return
    texts: list[str] = []
    for number, block in enumerate(content):
        if block.get("type") != "tool_result":
            texts += _texts([block], f"{where}.{number}")
            continue
        if texts:
            yield Message(role=role, content="\n".join(texts))
            texts = []
        result = block.get("content") or ""
        yield Message(
            role="tool",
            content="\n".join(_texts(result, f"{where}.{number}.content")),
            tool_call_id=_string(block, "tool_use_id", f"{where}.{number}"),
        )
    if texts:
        yield Message(role=role, content="\n".join(texts))


def _texts(content: object, where: str) -> list[str]:
    """Return the texts of a content. Raises GatewayError for blocks that are not text."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise invalid(where, "must be a text or a list of blocks")
    texts = []
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            raise _unknown_block(kind, f"{where}.{number}")
        texts.append(_string(block, "text", f"{where}.{number}"))
    return texts


def _string(block: dict[str, Any], name: str, where: str) -> str:
    found = block.get(name)
    if not isinstance(found, str):
        raise invalid(f"{where}.{name}", "must be a text")
    return found


def _unknown_block(kind: object, where: str) -> Exception:
    return unsupported(where, f"blocks of the type {str(kind)[:64]} are not supported")
