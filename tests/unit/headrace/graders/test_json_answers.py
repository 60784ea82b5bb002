"""Answers that must be JSON of a schema."""

import json
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.graders import json_schema
from headrace.graders.json_answers import find_json
from headrace.graders.schema_subset import is_valid

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def _without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"name": "Ann", "age": 7}', 1.0),
        ('Sure!\n```json\n{"name": "Ann", "age": 7}\n```\nDone.', 1.0),
        ('```\n{"name": "Ann", "age": 7}\n```', 1.0),
        ('It is {"name": "Ann", "age": 7}, I think.', 1.0),
        ('{"name": "Ann", "age": -7}', 0.0),
        ('{"name": "", "age": 7}', 0.0),
        ('{"name": "Ann", "age": 7, "x": 1}', 0.0),
        ('{"name": "Ann", "age": NaN}', 0.0),
        ('{"name": "Ann", "age": 1e999}', 0.0),
        ('{"name": "Ann"', 0.0),
        ("no JSON", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_is_valid_or_not(text: str, reward: float) -> None:
    assert json_schema(text, json.dumps(PERSON)) == reward
    assert json_schema(text, "", {"schema": PERSON}) == reward


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_every_value_is_found_and_valid_by_its_own_constant(value: Any) -> None:
    assert find_json(json.dumps(value)) == value
    assert is_valid(value, {"const": value})
    assert is_valid(value, {"enum": [value, 1]})
    assert is_valid(value, {"not": {"not": True}})
    assert not is_valid(value, False)


@given(VALUES, VALUES)
def test_types_exclude_each_other(value: Any, other: Any) -> None:
    kinds = ["null", "boolean", "object", "array", "string", "number"]
    assert sum(is_valid(value, {"type": kind}) for kind in kinds) == 1
    assert is_valid([value, other], {"prefixItems": [{"const": value}], "items": {"const": other}})


@pytest.mark.parametrize(
    ("schema", "value", "valid"),
    [
        ({"type": "integer"}, 1.0, True),
        ({"type": "integer"}, 1.5, False),
        ({"type": "integer"}, True, False),
        ({"type": ["null", "string"]}, None, True),
        ({"const": 1}, True, False),
        ({"const": 1}, 1.0, True),
        ({"uniqueItems": True}, [1, 1.0], False),
        ({"uniqueItems": True}, [1, True], True),
        ({"multipleOf": 0.1}, 0.3, True),
        ({"multipleOf": 3}, 10, False),
        ({"exclusiveMaximum": 3}, 3, False),
        ({"exclusiveMinimum": 3}, 4, True),
        ({"maximum": 3}, 3, True),
        ({"pattern": "^a+$"}, "aab", False),
        ({"pattern": "^a+$"}, "a" * 2000, False),
        ({"maxLength": 2}, "abc", False),
        ({"minItems": 1, "maxItems": 2}, [], False),
        ({"minProperties": 1, "maxProperties": 1}, {"a": 1}, True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 1, False),
        ({"oneOf": [{"minimum": 1}, {"minimum": 2}]}, 3, False),
        ({"allOf": [{"minimum": 1}, {"minimum": 2}]}, 3, True),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "null"}}}, None, True),
        ({"additionalProperties": {"type": "null"}}, {"a": 1}, False),
    ],
)
def test_each_keyword_accepts_and_refuses_as_json_schema_says(
    schema: dict[str, Any], value: Any, valid: bool
) -> None:
    assert is_valid(value, schema) is valid


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"if": True}, "'if' of the schema is not supported"),
        ({"type": "int"}, "'int' is not a type"),
        ({"$ref": "http://x/y"}, "leaves the schema"),
        ({"$ref": "#/$defs/x"}, "names nothing"),
        ({"items": 3}, "is not a schema"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        is_valid([1], schema)


def test_a_schema_that_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="is not JSON: 'a person'"):
        json_schema("{}", "a person")
    with pytest.raises(ValueError, match="is not an object"):
        json_schema("{}", "[1]")


def test_recursion_is_bounded() -> None:
    deep = "[" * 500 + "]" * 500
    tree = {"items": {"$ref": "#"}}
    assert json_schema(deep, json.dumps(tree)) == 0.0
    assert json_schema("1", '{"$ref": "#"}') == 0.0
    with pytest.raises(ValueError, match="needs more than 100000 checks"):
        is_valid(1, {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]})


@pytest.mark.parametrize(
    "text",
    [
        "[" * (1 << 20),
        "{" * 500_000 + "}" * 500_000,
        "1" * (1 << 20),
        "```" * 300_000,
        '"' * 900_000,
    ],
)
def test_hostile_answers_take_no_time(text: str) -> None:
    begun = time.process_time()
    assert json_schema(text, json.dumps(PERSON)) == 0.0
    assert time.process_time() - begun < 0.5


def test_the_package_decides_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Validator:
        def __init__(self, schema: object) -> None:
            self.schema = schema

        def is_valid(self, value: object) -> bool:
            return value == 3

    class Package:
        class validators:  # noqa: N801 - its name in jsonschema
            @staticmethod
            def validator_for(schema: object) -> type[Validator]:
                return Validator

    monkeypatch.setitem(sys.modules, "jsonschema", Package)
    assert json_schema("3", '{"if": true}') == 1.0
    assert json_schema("4", '{"if": true}') == 0.0
