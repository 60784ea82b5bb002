"""Types of tool arguments: the JSON Schema of a type hint, and how a JSON value becomes a value of it.

A model writes arguments, so anything may be in them. A value that does not fit raises ArgumentMismatch
with a text that the model can act on. A hint that has no schema raises TypeError when the tool is
defined.
"""

import collections.abc
import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
Read = Callable[[object, str], object]
"""Makes a value of a JSON value. The second argument is the place of the value, for errors."""

LONGEST_VALUE = 100
MOST_DEPTH = 32
MOST_LISTED = 50


class ArgumentMismatch(ValueError):
    """A value does not fit the type of an argument; the text says where and what is expected."""


@dataclass(frozen=True, slots=True)
class ArgumentType:
    """The schema of a type, and how its values are read."""

    schema: Schema
    read: Read


def argument_type(hint: Any, *, within: tuple[Any, ...] = ()) -> ArgumentType:
    """Return the type of a hint. `within` are the classes that contain it. Raises TypeError for a hint
    that has no JSON Schema, and for a class that contains itself."""
    if hint is Any or hint is object or hint is inspect.Parameter.empty:
        return ArgumentType({}, lambda value, _: value)
    if hint is None or hint is type(None):
        return ArgumentType({"type": "null"}, _reader("null", lambda value: value is None))
    if hint in PLAIN:
        return PLAIN[hint]
    if isinstance(hint, typing.NewType):
        return argument_type(hint.__supertype__, within=within)
    if hasattr(hint, "__value__"):  # an alias by `type X = ...`
        return argument_type(hint.__value__, within=within)
    if any(hint is outer for outer in within):
        raise TypeError(f"{_name(hint)} contains itself, and a schema cannot; use dict instead")
    if len(within) > MOST_DEPTH:
        raise TypeError(f"the type is nested more than {MOST_DEPTH} levels deep; use dict instead")
    if isinstance(hint, type) and not typing.get_args(hint):
        found = _class_type(hint, (*within, hint))
        if found is not None:
            return found
    return _generic_type(hint, within)


def _generic_type(hint: Any, within: tuple[Any, ...]) -> ArgumentType:
    """The type of a hint with arguments, such as `list[int]`."""
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is typing.Annotated:
        return _annotated_type(args, within)
    if origin is typing.Literal:
        return _choice_type({value: value for value in args})
    if origin is typing.Union or origin is types.UnionType:
        return _union_type([argument_type(arg, within=within) for arg in args], hint)
    if origin is tuple and args and args[-1] is not Ellipsis:
        return _fixed_tuple_type([argument_type(arg, within=within) for arg in args])
    if origin in ARRAYS:
        item = argument_type(args[0] if args else Any, within=(*within, origin))
        return _array_type(item, ARRAYS[origin])
    if origin in MAPPINGS:
        if args and args[0] not in (str, Any):
            raise TypeError(f"the keys of {hint} are not text; use dict[str, ...]")
        value = argument_type(args[1] if args else Any, within=(*within, origin))
        return _mapping_type(value)
    raise TypeError(
        f"{_name(hint)} has no JSON Schema; use str, int, float, bool, list, dict, Literal, an enum, a "
        "dataclass or a TypedDict"
    )


def _class_type(hint: type, within: tuple[Any, ...]) -> ArgumentType | None:
    """The type of an enum, a dataclass, a TypedDict or a Pydantic model; None for other classes."""
    if issubclass(hint, enum.Enum):
        return _choice_type({member.value: member for member in hint})
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        fields = [one for one in dataclasses.fields(hint) if one.init]
        known = {one.name: argument_type(hints[one.name], within=within) for one in fields}
        required = [
            one.name
            for one in fields
            if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        ]
        return object_type(known, required, make=lambda values: hint(**values))
    if typing.is_typeddict(hint):
        hints = typing.get_type_hints(hint)
        known = {name: argument_type(hints[name], within=within) for name in hints}
        required = [name for name in hints if name in getattr(hint, "__required_keys__", ())]
        return object_type(known, required, make=lambda values: values)
    if hasattr(hint, "model_json_schema") and hasattr(hint, "model_validate"):
        return _model_type(hint)
    return None


def object_type(
    known: dict[str, ArgumentType],
    required: list[str],
    *,
    make: Callable[[dict[str, object]], object],
    is_open: bool = False,
) -> ArgumentType:
    """The type of a JSON object with these keys. `make` makes the value, and `is_open` allows other
    keys."""
    schema: Schema = {
        "type": "object",
        "properties": {name: one.schema for name, one in known.items()},
        "required": required,
        "additionalProperties": is_open,
    }

    def read(value: object, where: str) -> object:
        if not isinstance(value, dict):
            raise mismatch(where, "an object", value)
        missing = [name for name in required if name not in value]
        if missing:
            raise ArgumentMismatch(f"{where} lacks {', '.join(missing[:MOST_LISTED])}")
        unknown = [name for name in value if name not in known]
        if unknown and not is_open:
            names = ", ".join(repr(name)[:LONGEST_VALUE] for name in unknown[:5])
            takes = ", ".join([*known][:MOST_LISTED]) or "nothing"
            raise ArgumentMismatch(f"{where} has unknown {names}; it takes {takes}")
        free = argument_type(Any)
        return make(
            {
                name: known.get(name, free).read(part, name if where == TOP else f"{where}.{name}")
                for name, part in value.items()
            }
        )

    return ArgumentType(schema, read)


TOP = "the arguments"
"""The place of the whole object of arguments, in errors."""


def mismatch(where: str, expected: str, value: object) -> ArgumentMismatch:
    """The error for a value that is not what is expected at a place."""
    return ArgumentMismatch(f"{where} must be {expected}, got {_excerpt(value)}")


def _reader(expected: str, fits: Callable[[object], bool]) -> Read:
    def read(value: object, where: str) -> object:
        if not fits(value):
            raise mismatch(where, expected, value)
        return value

    return read


def _read_integer(value: object, where: str) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise mismatch(where, "an integer", value)
    return value


def _read_number(value: object, where: str) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise mismatch(where, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise mismatch(where, "a number that fits into 64 bits", value) from None


def _annotated_type(args: tuple[Any, ...], within: tuple[Any, ...]) -> ArgumentType:
    """`Annotated[T, "text"]` describes the argument, and so does an object with a `description`."""
    plain = argument_type(args[0], within=within)
    texts = [one if isinstance(one, str) else getattr(one, "description", None) for one in args[1:]]
    said = next((text for text in texts if isinstance(text, str) and text), None)
    return ArgumentType({**plain.schema, "description": said}, plain.read) if said else plain


def _choice_type(members: dict[Any, object]) -> ArgumentType:
    """The type of a value from a list."""
    if not all(value is None or isinstance(value, str | int | float) for value in members):
        raise TypeError(
            "the values of an enum or a Literal must be text, numbers, true, false or null"
        )
    listed = list(members)
    schema: Schema = {"enum": listed}
    kinds = {type(value) for value in listed}
    if len(kinds) == 1 and (kind := KINDS.get(kinds.pop())):
        schema = {"type": kind, **schema}

    def read(value: object, where: str) -> object:
        for known, member in members.items():
            if known == value and isinstance(known, bool) == isinstance(value, bool):
                return member
        shown = ", ".join(_excerpt(one) for one in listed[:MOST_LISTED])
        raise mismatch(where, f"one of {shown}", value)

    return ArgumentType(schema, read)


def _union_type(members: list[ArgumentType], hint: Any) -> ArgumentType:
    def read(value: object, where: str) -> object:
        errors = []
        for member in members:
            try:
                return member.read(value, where)
            except ArgumentMismatch as error:
                errors.append(str(error))
        others = [text for text in errors if "must be null" not in text]
        raise ArgumentMismatch(others[0] if len(others) == 1 else " or ".join(errors)[:500])

    return ArgumentType({"anyOf": [member.schema for member in members]}, read)


def _array_type(item: ArgumentType, make: Callable[[Any], object]) -> ArgumentType:
    def read(value: object, where: str) -> object:
        if not isinstance(value, list):
            raise mismatch(where, "an array", value)
        parts = [item.read(part, f"{where}[{n}]") for n, part in enumerate(value)]
        try:
            return make(parts)
        except TypeError:
            raise mismatch(where, "an array of values that a set can hold", value) from None

    schema: Schema = {"type": "array", "items": item.schema}
    if make in (set, frozenset):
        schema["uniqueItems"] = True
    return ArgumentType(schema, read)


def _fixed_tuple_type(items: list[ArgumentType]) -> ArgumentType:
    def read(value: object, where: str) -> object:
        if not isinstance(value, list) or len(value) != len(items):
            raise mismatch(where, f"an array of {len(items)} values", value)
        pairs = zip(items, value, strict=True)
        return tuple(item.read(part, f"{where}[{n}]") for n, (item, part) in enumerate(pairs))

    length = {"minItems": len(items), "maxItems": len(items)}
    return ArgumentType(
        {"type": "array", "prefixItems": [item.schema for item in items], **length}, read
    )


def _mapping_type(item: ArgumentType) -> ArgumentType:
    def read(value: object, where: str) -> object:
        if not isinstance(value, dict):
            raise mismatch(where, "an object", value)
        return {key: item.read(part, f"{where}.{key}") for key, part in value.items()}

    return ArgumentType({"type": "object", "additionalProperties": item.schema}, read)


def _model_type(model: Any) -> ArgumentType:
    """The type of a Pydantic model of the rollout's environment."""

    def read(value: object, where: str) -> object:
        try:
            return model.model_validate(value)
        except ValueError as error:
            raise ArgumentMismatch(f"{where} does not fit {model.__name__}: {error}") from None

    return ArgumentType(model.model_json_schema(), read)


def _excerpt(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _name(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint))


PLAIN: dict[Any, ArgumentType] = {
    str: ArgumentType({"type": "string"}, _reader("text", lambda value: isinstance(value, str))),
    int: ArgumentType({"type": "integer"}, _read_integer),
    float: ArgumentType({"type": "number"}, _read_number),
    bool: ArgumentType(
        {"type": "boolean"}, _reader("true or false", lambda value: isinstance(value, bool))
    ),
}
KINDS: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
ARRAYS: dict[Any, Callable[[Any], object]] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.Iterable: list,
    collections.abc.Collection: list,
}
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
