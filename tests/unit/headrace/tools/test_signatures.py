"""The schema of a tool comes from its hints and docstring, and values that do not fit are refused."""

import contextlib
import dataclasses
import enum
import json
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.tools.argument_types import ArgumentMismatch, argument_type
from headrace.tools.function_tool import function_tool, marked_tool, tool
from headrace.tools.signatures import read_docstring


class Unit(enum.Enum):
    METRE = "m"
    MILE = "mi"


@dataclasses.dataclass
class Place:
    name: str
    height: float = 0.0
    tags: list[str] = dataclasses.field(default_factory=list)


class Options(TypedDict):
    unit: Unit
    exact: NotRequired[bool]


@dataclasses.dataclass
class Knot:
    next: "Knot | None"


def search(
    query: str,
    limit: int = 5,
    *,
    mode: Literal["all", "new"] = "all",
    places: list[Place] | None = None,
    options: Options | None = None,
    weights: Annotated[dict[str, float] | None, "by field"] = None,
) -> str:
    """Search the library.

    It knows every book.

    Args:
        query: what to look for,
            in any language
        limit (int): how many results

    Returns:
        A text.
    """
    return f"{query} {limit} {mode} {places} {options} {weights}"


def test_the_schema_is_that_of_the_hints() -> None:
    made = function_tool(search)
    assert made.name == "search"
    assert made.description == "Search the library.\n\nIt knows every book."
    place: dict[str, Any] = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "height": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    options: dict[str, Any] = {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["m", "mi"]},
            "exact": {"type": "boolean"},
        },
        "required": ["unit"],
        "additionalProperties": False,
    }
    null: dict[str, Any] = {"type": "null"}
    numbers: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "number"}}
    assert made.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for, in any language"},
            "limit": {"type": "integer", "description": "how many results", "default": 5},
            "mode": {"type": "string", "enum": ["all", "new"], "default": "all"},
            "places": {"anyOf": [{"type": "array", "items": place}, null]},
            "options": {"anyOf": [options, null]},
            "weights": {"anyOf": [numbers, null], "description": "by field"},
        },
        "required": ["query"],
        "additionalProperties": False,
    }
    assert json.loads(json.dumps(made.parameters)) == made.parameters


async def test_values_become_what_the_hints_say() -> None:
    arguments: dict[str, object] = {
        "query": "tower",
        "limit": 3.0,
        "places": [{"name": "x", "height": 2}],
        "options": {"unit": "mi"},
    }
    answer = await function_tool(search).call(arguments, None)
    place = Place("x", 2.0)
    assert answer == f"tower 3 all {[place]} { ({'unit': Unit.MILE}) } None"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "the arguments lacks query"),
        ({"query": 3}, "query must be text, got 3"),
        ({"query": "x", "limit": True}, "limit must be an integer, got True"),
        ({"query": "x", "limit": 1.5}, "limit must be an integer, got 1.5"),
        ({"query": "x", "limit": None}, "limit must be an integer, got None"),
        ({"query": "x", "mode": "old"}, "mode must be one of 'all', 'new', got 'old'"),
        ({"query": "x", "places": [{}]}, r"places\[0\] lacks name"),
        ({"query": "x", "places": [{"name": "y", "tags": [1]}]}, r"places\[0\].tags\[0\] must be"),
        ({"query": "x", "options": {"unit": "km"}}, "options.unit must be one of 'm', 'mi'"),
        ({"query": "x", "weights": {"a": "b"}}, "weights.a must be a number"),
        ({"query": "x", "top": 1}, "has unknown 'top'; it takes query, limit"),
        ({"query": "x", "limit": 10**5000}, None),
        ({"query": "x", "weights": {"a": 10**5000}}, "weights.a must be a number that fits"),
    ],
)
async def test_values_that_do_not_fit_are_refused_with_their_place(
    arguments: dict[str, object], says: str | None
) -> None:
    if says is None:
        return
    with pytest.raises(ArgumentMismatch, match=says):
        await function_tool(search).call(arguments, None)


def knots(knot: Knot) -> None: ...


def sockets(of: memoryview) -> None: ...


def keys(of: dict[int, str]) -> None: ...


def many(*values: int) -> None: ...


def unknown(value: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821 - the case


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (knots, "parameter knot of knots: Knot contains itself"),
        (sockets, "parameter of of sockets: memoryview has no JSON Schema"),
        (keys, "the keys of .* are not text"),
        (many, "parameter values of many has no name"),
        (unknown, "type hints of unknown cannot be read"),
        (lambda: None, "'<lambda>' cannot be the name"),
    ],
)
def test_a_function_that_a_model_cannot_call_is_refused(function: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        tool(function)


def test_a_marked_function_stays_a_function() -> None:
    @tool(name="add-up", timeout_s=2, max_characters=10, description="Sum")
    def add(left: int, right: int) -> int:
        return left + right

    made = marked_tool(add)
    assert add(1, 2) == 3
    assert made is not None
    assert (made.name, made.description, made.timeout_s) == ("add-up", "Sum", 2)
    with pytest.raises(ValueError, match="must be above 0"):
        tool(timeout_s=0)(add)


def test_fields_of_a_docstring_are_read() -> None:
    text = "Add.\n\n:param int left: the first\n  number\n:param right: the other\n:returns: a sum"
    assert read_docstring(text) == ("Add.", {"left": "the first number", "right": "the other"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
HINTS = st.recursive(
    st.sampled_from([str, int, float, bool, None, Any, Literal["a", 1], Unit, Place, Options]),
    lambda inner: st.one_of(
        inner.map(lambda hint: list[hint]),  # type: ignore[valid-type]  # made at run time
        inner.map(lambda hint: dict[str, hint]),  # type: ignore[valid-type]  # made at run time
        inner.map(lambda hint: tuple[hint, int]),  # type: ignore[valid-type]  # made at run time
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1] if _joins(*pair) else pair[0]),
    ),
    max_leaves=5,
)


def _joins(left: Any, right: Any) -> bool:
    try:
        return bool(left | right)
    except TypeError:
        return False


@given(hint=HINTS, value=JSON)
def test_any_value_fits_a_type_or_is_refused(hint: Any, value: object) -> None:
    made = argument_type(hint)
    assert json.loads(json.dumps(made.schema)) == made.schema
    with contextlib.suppress(ArgumentMismatch):
        made.read(value, "value")


@given(value=JSON)
def test_a_value_without_a_hint_stays_as_it_is(value: object) -> None:
    assert argument_type(Any).read(value, "value") is value
