"""Forced formats and calls in each wire format become one constraint, or are refused by name."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from infra.model_api.wire import anthropic, chat_completions, completions, responses
from infra.model_api.wire.errors import GatewayError
from infra.model_api.wire.request import ModelRequest
from schemas.models.constraints import Constraint
from schemas.secrets.masking import Masks

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA)
NAMES = ("add", "weigh")
Parse = Callable[[dict[str, Any]], ModelRequest]


def chat(changes: dict[str, Any]) -> ModelRequest:
    tools = [{"type": "function", "function": {"name": name}} for name in NAMES]
    body = {"messages": [{"role": "user", "content": "?"}], "tools": tools, **changes}
    return chat_completions.parse(json.dumps(body).encode()).model_request


def response(changes: dict[str, Any]) -> ModelRequest:
    tools = [{"type": "function", "name": name, "parameters": {}} for name in NAMES]
    body = {"input": "?", "tools": tools, **changes}
    return responses.parse(json.dumps(body).encode()).model_request


def message(changes: dict[str, Any]) -> ModelRequest:
    tools = [{"name": name, "input_schema": {}} for name in NAMES]
    asked = [{"role": "user", "content": "?"}]
    body = {"max_tokens": 9, "messages": asked, "tools": tools, **changes}
    return anthropic.parse(json.dumps(body).encode()).model_request


ANY, ONE = Constraint(calls=NAMES), Constraint(calls=("weigh",))
NESTED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
FLAT = {"type": "json_schema", "name": "answer", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("parse", "changes", "constraint"),
    [
        (chat, {}, None),
        (chat, {"tool_choice": "auto", "response_format": {"type": "text"}}, None),
        (chat, {"tool_choice": "required"}, ANY),
        (chat, {"tool_choice": {"type": "function", "function": {"name": "weigh"}}}, ONE),
        (chat, {"tools": [], "response_format": NESTED}, Constraint(json_schema=TEXT)),
        (chat, {"response_format": NESTED}, Constraint(json_schema=TEXT, calls=NAMES)),
        (chat, {"response_format": NESTED, "tool_choice": "none"}, Constraint(json_schema=TEXT)),
        (chat, {"response_format": NESTED, "tool_choice": "required"}, ANY),
        (
            chat,
            {"tools": None, "response_format": {"type": "json_object"}},
            Constraint(json_schema='{"type": "object"}'),
        ),
        (response, {"tool_choice": "required"}, ANY),
        (response, {"tool_choice": {"type": "function", "name": "weigh"}}, ONE),
        (response, {"tools": [], "text": {"format": FLAT}}, Constraint(json_schema=TEXT)),
        (response, {"text": {"format": {"type": "text"}}}, None),
        (message, {"tool_choice": {"type": "any"}}, ANY),
        (message, {"tool_choice": {"type": "tool", "name": "weigh"}}, ONE),
        (message, {"tools": [], "output_format": FLAT}, Constraint(json_schema=TEXT)),
        (message, {"tools": [], "output_config": {"format": FLAT}}, Constraint(json_schema=TEXT)),
        (message, {"output_config": {"effort": "low"}}, None),
    ],
)
def test_a_forced_answer_becomes_a_constraint(
    parse: Parse, changes: dict[str, Any], constraint: Constraint | None
) -> None:
    assert parse(changes).constraint == constraint


def test_a_forced_call_still_offers_all_tools() -> None:
    """The prompt is that of a free choice, so a policy sees the same tools either way."""
    forced = chat({"tool_choice": {"type": "function", "function": {"name": "weigh"}}})
    assert [tool.name for tool in forced.tools] == list(NAMES)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


LARGE = {"enum": [f"{number:060}" for number in range(16_000)]}


@pytest.mark.parametrize(
    ("parse", "changes", "parameter", "why"),
    [
        (chat, {"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            chat,
            {"tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
            "no tool 'sub'",
        ),
        (chat, {"tool_choice": "sometimes"}, "tool_choice", "not supported"),
        (chat, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "not supported"),
        (chat, {"response_format": {"type": "xml"}}, "response_format", "use json_schema or text"),
        (
            chat,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "response_format.json_schema.schema",
            "must be a JSON Schema",
        ),
        (
            chat,
            {"response_format": {"type": "json_schema", "schema": LARGE}},
            "response_format.schema",
            "at most 65536",
        ),
        (
            chat,
            {"response_format": {"type": "json_schema", "schema": nested(40)}},
            "response_format.schema",
            "nested more than 32",
        ),
        (chat, {"response_format": []}, "response_format", "an object"),
        (response, {"text": {"format": {"type": "xml"}}}, "text.format", "use json_schema"),
        (response, {"tool_choice": {"type": "web_search"}}, "tool_choice", "not supported"),
        (message, {"tool_choice": {"type": "tool"}}, "tool_choice", "not supported"),
        (message, {"output_format": {"type": "xml"}}, "output_format", "use json_schema"),
    ],
)
def test_an_answer_that_cannot_be_forced_is_refused_by_name(
    parse: Parse, changes: dict[str, Any], parameter: str, why: str
) -> None:
    with pytest.raises(GatewayError, match=why) as raised:
        parse(changes)
    assert (raised.value.status, raised.value.parameter) == (400, parameter)


def test_a_text_without_messages_has_no_format() -> None:
    body = {"prompt": "once", "response_format": {"type": "json_object"}}
    with pytest.raises(GatewayError, match="use chat completions"):
        completions.parse(json.dumps(body).encode())


def test_secrets_in_a_constraint_are_masked() -> None:
    secret = "hush-hush-hush"
    schema = {"type": "object", "properties": {secret: {"const": secret}}}
    asked = chat({"response_format": {"type": "json_schema", "schema": schema}})
    masked = asked.mask(Masks({"KEY": secret}))
    assert masked.constraint is not None
    assert secret not in masked.constraint.model_dump_json()
    assert "KEY" in str(masked.constraint.json_schema)
