"""Reads what a model must know of a function: the schema of its arguments, and its docstring."""

import inspect
import re
import textwrap
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.tools.argument_types import ArgumentType, argument_type, object_type

LONGEST_DESCRIPTION = 4096
SECTION = re.compile(
    r"^(args|arguments|parameters|params|returns?|yields?|raises?|examples?|notes?):?\s*$", re.I
)
ARGUMENTS = ("args", "arguments", "parameters", "params")
ENTRY = re.compile(r"^(\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
FIELD = re.compile(r"^:(\w+)(?:\s+[^:]*?)?(?:\s*(\w+))?:\s*(.*)$")


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The arguments of a function, as one type. `context` is the parameter that gets the workflow's
    context, which the model does not see."""

    description: str
    arguments: ArgumentType
    context: str | None


def call_signature(function: Callable[..., object], *, is_method: bool = False) -> CallSignature:
    """Read the signature of a function. Raises TypeError, which names the parameter, when it has one
    that a model cannot give."""
    name = getattr(function, "__name__", "tool")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # hints are evaluated, so they raise whatever they like
        raise TypeError(f"the type hints of {name} cannot be read: {error}") from error
    description, texts = read_docstring(inspect.getdoc(function) or "")
    known: dict[str, ArgumentType] = {}
    required: list[str] = []
    context, is_open = None, False
    parameters = list(inspect.signature(function).parameters.values())
    for parameter in parameters[1:] if is_method else parameters:
        hint = hints.get(parameter.name, Any)
        if getattr(hint, "__headrace_context__", False):
            context = parameter.name
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            is_open = True
            continue
        if parameter.kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.POSITIONAL_ONLY,
        ):
            raise TypeError(
                f"parameter {parameter.name} of {name} has no name for the model; write it without "
                "`*` and `/`"
            )
        known[parameter.name] = _parameter_type(parameter, hint, texts.get(parameter.name), name)
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    arguments = object_type(known, required, make=lambda values: values, is_open=is_open)
    return CallSignature(description[:LONGEST_DESCRIPTION], arguments, context)


def _parameter_type(
    parameter: inspect.Parameter, hint: Any, text: str | None, name: str
) -> ArgumentType:
    try:
        plain = argument_type(hint)
    except TypeError as error:
        raise TypeError(f"parameter {parameter.name} of {name}: {error}") from None
    schema = dict(plain.schema)
    if text and "description" not in schema:
        schema["description"] = text[:LONGEST_DESCRIPTION]
    if isinstance(parameter.default, str | int | float | bool):
        schema["default"] = parameter.default
    return ArgumentType(schema, plain.read)


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of a docstring, and the texts of its parameters (`Args:` in Google's style,
    or `:param name: text`)."""
    lines = inspect.cleandoc(text).splitlines()
    described: list[str] = []
    texts: dict[str, list[str]] = {}
    section, current = "", None
    for line in lines:
        if heading := SECTION.fullmatch(line):
            section, current = heading[1].lower(), None
            continue
        if line.startswith(":") and (entry := FIELD.fullmatch(line)):
            section, current = "fields", None
            if entry[1] == "param" and entry[2]:
                current = texts.setdefault(entry[2], [entry[3]])
            continue
        if not section:
            described.append(line)
        elif current is not None and line[:1] in (" ", "") and section == "fields":
            current.append(line.strip())
        elif section in ARGUMENTS:
            current = _argument_line(line, texts, current)
    description = textwrap.dedent("\n".join(described)).strip()
    return description, {name: " ".join(parts).strip() for name, parts in texts.items()}


def _argument_line(
    line: str, texts: dict[str, list[str]], current: list[str] | None
) -> list[str] | None:
    """Read a line of an `Args:` section. Returns the text that the next line continues."""
    entry = ENTRY.fullmatch(line.strip())
    depth = len(line) - len(line.lstrip())
    if entry and depth <= 4:
        return texts.setdefault(entry[1].lstrip("*"), [entry[2]])
    if current is not None:
        current.append(line.strip())
    return current
