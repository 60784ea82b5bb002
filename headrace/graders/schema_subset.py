"""Checks a JSON value against a JSON Schema, with the keywords that schemas of answers use.

Keywords that only describe (`title`, `description`, `format` ...) are ignored. Any other keyword that is
not in CHECKS is refused by name, so that a schema is never checked in part. References may point inside
of the schema only. The number of checks is bounded.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

MOST_CHECKS = 100_000
DEEPEST = 100
LONGEST_FOR_PATTERN = 1000
"""A longer string does not match any `pattern`, because a pattern may take long."""

DESCRIPTIVE = frozenset(
    [
        *("title", "description", "default", "examples", "format", "deprecated", "readOnly"),
        *("writeOnly", "$schema", "$id", "$comment", "$defs", "definitions", "$anchor"),
        *("contentMediaType", "contentEncoding"),
    ]
)
Schema = Mapping[str, Any] | bool


def is_valid(value: object, schema: Schema) -> bool:
    """Whether a JSON value is valid by a schema. Raises ValueError for a schema that cannot be checked.

    >>> is_valid([1, "a"], {"items": {"type": "integer"}})
    False
    """
    try:
        return _Checker(schema).check(value, schema, depth=0)
    except RecursionError:  # the value is nested too deeply to be compared
        return False


class _Checker:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = MOST_CHECKS

    def check(self, value: object, schema: object, *, depth: int) -> bool:
        self._left -= 1
        if self._left < 0:
            raise ValueError(
                f"the schema needs more than {MOST_CHECKS} checks for this answer; simplify it, or add "
                "the package jsonschema to the pyproject.toml of this rollout"
            )
        if depth > DEEPEST:
            return False
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise ValueError(
                f"{str(schema)[:80]!r} is not a schema; write an object, true or false"
            )
        return all(
            self._holds(keyword, value, schema, depth)
            for keyword in schema
            if keyword not in DESCRIPTIVE
        )

    def _holds(self, keyword: str, value: object, schema: Mapping[str, Any], depth: int) -> bool:
        if keyword not in CHECKS:
            raise ValueError(
                f"the keyword {keyword[:80]!r} of the schema is not supported; leave it out, or add the "
                "package jsonschema to the pyproject.toml of this rollout"
            )
        return CHECKS[keyword](_Case(self, value, schema[keyword], schema, depth + 1))

    def resolve(self, reference: str) -> object:
        if not reference.startswith("#"):
            raise ValueError(
                f"$ref {reference[:80]!r} leaves the schema; write it as '#/$defs/...'"
            )
        found: object = self._root
        for part in filter(None, reference[1:].split("/")):
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                raise ValueError(f"$ref {reference[:80]!r} names nothing in the schema; correct it")
            found = found[name]
        return found


@dataclass(frozen=True, slots=True)
class _Case:
    """A value, and the argument of one keyword of the `schema` that it is checked against."""

    checker: _Checker
    value: Any
    argument: Any
    schema: Mapping[str, Any]
    depth: int

    def accepts(self, value: object, schema: object) -> bool:
        return self.checker.check(value, schema, depth=self.depth)


TYPES: dict[str, Callable[[object], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": lambda value: _is_number(value),
    "integer": lambda value: _is_whole(value),
}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


def _canonical(value: object) -> str:
    """A text that is equal for equal JSON values. 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{json.dumps(k)}:{_canonical(v)}" for k, v in sorted(value.items()))
            + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return json.dumps(value)


def _has_type(case: _Case) -> bool:
    names = [case.argument] if isinstance(case.argument, str) else case.argument
    unknown = [name for name in names if name not in TYPES]
    if unknown:
        raise ValueError(f"{str(unknown[0])[:80]!r} is not a type; use one of: {', '.join(TYPES)}")
    return any(TYPES[name](case.value) for name in names)


def _has_properties(case: _Case) -> bool:
    if not isinstance(case.value, dict):
        return True
    return all(
        case.accepts(case.value[name], schema)
        for name, schema in case.argument.items()
        if name in case.value
    )


def _has_additional(case: _Case) -> bool:
    if not isinstance(case.value, dict):
        return True
    known = case.schema.get("properties", {})
    return all(case.accepts(v, case.argument) for k, v in case.value.items() if k not in known)


def _has_items(case: _Case) -> bool:
    if not isinstance(case.value, list):
        return True
    first = len(case.schema.get("prefixItems", ()))
    return all(case.accepts(item, case.argument) for item in case.value[first:])


def _has_prefix_items(case: _Case) -> bool:
    if not isinstance(case.value, list):
        return True
    pairs = zip(case.value, case.argument, strict=False)
    return all(case.accepts(item, schema) for item, schema in pairs)


def _is_unique(case: _Case) -> bool:
    if not (case.argument and isinstance(case.value, list)):
        return True
    return len(set(map(_canonical, case.value))) == len(case.value)


def _matches(case: _Case) -> bool:
    if not isinstance(case.value, str):
        return True
    return len(case.value) <= LONGEST_FOR_PATTERN and bool(re.search(case.argument, case.value))


def _is_multiple(case: _Case) -> bool:
    if not _is_number(case.value):
        return True
    return Fraction(str(case.value)) % Fraction(str(case.argument)) == 0


def _size_check(
    kind: type[dict[str, Any] | list[Any] | str], holds: Callable[[int, int], bool]
) -> Callable[[_Case], bool]:
    return lambda case: not isinstance(case.value, kind) or holds(len(case.value), case.argument)


def _number_check(holds: Callable[[Any, Any], bool]) -> Callable[[_Case], bool]:
    return lambda case: not _is_number(case.value) or holds(case.value, case.argument)


CHECKS: dict[str, Callable[[_Case], bool]] = {
    "type": _has_type,
    "enum": lambda case: _canonical(case.value) in map(_canonical, case.argument),
    "const": lambda case: _canonical(case.value) == _canonical(case.argument),
    "properties": _has_properties,
    "additionalProperties": _has_additional,
    "required": lambda case: (
        not isinstance(case.value, dict) or set(case.argument) <= set(case.value)
    ),
    "minProperties": _size_check(dict, lambda size, least: size >= least),
    "maxProperties": _size_check(dict, lambda size, most: size <= most),
    "items": _has_items,
    "prefixItems": _has_prefix_items,
    "minItems": _size_check(list, lambda size, least: size >= least),
    "maxItems": _size_check(list, lambda size, most: size <= most),
    "uniqueItems": _is_unique,
    "minLength": _size_check(str, lambda size, least: size >= least),
    "maxLength": _size_check(str, lambda size, most: size <= most),
    "pattern": _matches,
    "minimum": _number_check(lambda value, bound: value >= bound),
    "maximum": _number_check(lambda value, bound: value <= bound),
    "exclusiveMinimum": _number_check(lambda value, bound: value > bound),
    "exclusiveMaximum": _number_check(lambda value, bound: value < bound),
    "multipleOf": _is_multiple,
    "anyOf": lambda case: any(case.accepts(case.value, one) for one in case.argument),
    "allOf": lambda case: all(case.accepts(case.value, one) for one in case.argument),
    "oneOf": lambda case: sum(case.accepts(case.value, one) for one in case.argument) == 1,
    "not": lambda case: not case.accepts(case.value, case.argument),
    "$ref": lambda case: case.accepts(case.value, case.checker.resolve(case.argument)),
}
