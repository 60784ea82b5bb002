"""Definitions of tools: what is refused, and why."""

import time
from typing import Any

import pytest

from infra.model_api.wire.errors import GatewayError
from infra.model_api.wire.tools import (
    DEEPEST_SCHEMA,
    LARGEST_SCHEMA,
    LONGEST_DESCRIPTION,
    MOST_TOOLS,
    check_tools,
    tool_spec,
)
from schemas.sampling import ToolSpec


def nested(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(levels):
        made = {"items": made}
    return made


def chain(num: int) -> dict[str, Any]:
    defs = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": defs}


TREE = {
    "$defs": {"node": {"properties": {"child": {"anyOf": [{"$ref": "#/$defs/node"}]}}}},
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": None}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "a" * 129}, "name"),
        ({"description": 5}, "must be a text"),
        ({"description": "x" * (LONGEST_DESCRIPTION + 1)}, "more than"),
        ({"schema": []}, "JSON Schema"),
        ({"schema": {"description": "x" * (1 << 20)}}, f"at most {LARGEST_SCHEMA}"),
        ({"schema": nested(DEEPEST_SCHEMA)}, "levels deep"),
        ({"schema": TREE}, "recursive"),
        ({"schema": {"items": {"$ref": "#"}}}, "recursive"),
        ({"schema": chain(1000)}, "recursive"),
    ],
)
def test_an_invalid_definition_of_a_tool_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(GatewayError, match=says) as raised:
        tool_spec("tools.0", **{"name": "add", "description": None, "schema": None, **changes})
    assert raised.value.status == 400
    assert raised.value.parameter
    assert raised.value.parameter.startswith("tools.0")
    assert len(raised.value.message) < 300


def test_a_definition_that_is_used_twice_is_not_recursive() -> None:
    schema = {
        "properties": {"a": {"$ref": "#/$defs/p"}, "b": {"$ref": "#/$defs/p"}},
        "$defs": {"p": {"type": "integer"}},
        "$other": {"$ref": "https://example.com/schema"},
    }
    assert "integer" in tool_spec("t", name="add", description="x", schema=schema).parameters
    assert tool_spec("t", name="add", description=None, schema=nested(10)).description == ""


def test_many_references_to_one_large_definition_cost_no_time() -> None:
    """Searching the definition for each of them held the worker for seconds."""
    large = {str(number): 0 for number in range(2500)}
    schema = {"large": large, "all": [{"$ref": f"#{number}/large"} for number in range(1300)]}
    began = time.process_time()
    assert tool_spec("t", name="add", description=None, schema=schema).name == "add"
    assert time.process_time() - began < 1


def test_the_tools_of_a_request_are_bounded() -> None:
    tools = [ToolSpec(name=f"t{n}") for n in range(MOST_TOOLS)]
    assert len(check_tools(tools)) == MOST_TOOLS
    with pytest.raises(GatewayError, match="there are 500"):
        check_tools([ToolSpec(name=f"t{n}") for n in range(500)])
    with pytest.raises(GatewayError, match="t1 is defined twice"):
        check_tools([*tools[:2], tools[1]])
    large = [ToolSpec(name=f"t{n}", parameters="x" * LARGEST_SCHEMA) for n in range(5)]
    with pytest.raises(GatewayError, match="at most"):
        check_tools(large)
