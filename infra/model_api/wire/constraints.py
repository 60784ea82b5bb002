"""Constraints of a request on its answer: a format, a call of any tool, or a call of one of them.

A format and tools that may be called make an answer that is one of the two: a call, or the format. A
forced call takes the place of the format.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from infra.model_api.wire.errors import invalid, unsupported
from infra.model_api.wire.tools import mask_json, schema_text
from schemas.models.constraints import Constraint
from schemas.sampling import ToolSpec
from schemas.secrets.masking import Masks

ANY_JSON = '{"type": "object"}'
Choice = Literal["auto", "none", "any", "one"]


def format_schema(where: str, wanted: Mapping[str, Any] | None) -> str | None:
    """The JSON Schema, as JSON text, of a format in the form of any of the APIs; None for plain text.
    Raises GatewayError for other formats, and for a schema that is too large."""
    kind = (wanted or {}).get("type", "text")
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return ANY_JSON
    if kind != "json_schema":
        shown = json.dumps(kind)[:64]
        raise unsupported(where, f"type {shown} is not supported; use json_schema or text")
    inner, nested = f"{where}.json_schema", wanted.get("json_schema")
    place, schema = (
        (inner, nested.get("schema")) if isinstance(nested, dict) else (where, wanted.get("schema"))
    )
    if not isinstance(schema, dict):
        raise invalid(f"{place}.schema", "must be a JSON Schema object")
    return schema_text(f"{place}.schema", schema)


def choose_tools(
    tools: Sequence[ToolSpec], choice: Choice, *, name: object = None, schema: str | None = None
) -> tuple[tuple[ToolSpec, ...], Constraint | None]:
    """The tools that are offered, and what the answer is forced to be, if anything. `name` is that of
    the one tool that must be called. Raises GatewayError when there is no such tool."""
    if choice in ("any", "one"):
        names = tuple(tool.name for tool in tools if choice == "any" or tool.name == name)
        if not names:
            missing = "there are no tools" if choice == "any" else f"no tool {str(name)[:64]!r}"
            raise invalid("tool_choice", f"{missing} in this request; define one under tools")
        return tuple(tools), Constraint(calls=names)
    offered = tuple(tools) if choice == "auto" else ()
    if schema is None:
        return offered, None
    return offered, Constraint(json_schema=schema, calls=tuple(tool.name for tool in offered))


def openai_choice(choice: str | Mapping[str, Any] | None) -> tuple[Choice, object]:
    """OpenAI's `tool_choice`, of either of its APIs: the kind of choice, and the name of the tool."""
    match choice:
        case None | "auto":
            return "auto", None
        case "none":
            return "none", None
        case "required":
            return "any", None
        case {"type": "function", "function": {"name": name}} | {"type": "function", "name": name}:
            return "one", name
    raise _unknown_choice(choice)


def anthropic_choice(choice: Mapping[str, Any] | None) -> tuple[Choice, object]:
    """Anthropic's `tool_choice`: the kind of choice, and the name of the tool."""
    match choice:
        case None | {"type": "auto"}:
            return "auto", None
        case {"type": "none"}:
            return "none", None
        case {"type": "any"}:
            return "any", None
        case {"type": "tool", "name": name}:
            return "one", name
    raise _unknown_choice(choice)


def mask_constraint(constraint: Constraint, masks: Masks) -> Constraint:
    """Return a constraint with the secrets masked in every text."""
    schema = constraint.json_schema
    if schema is not None:
        schema = json.dumps(mask_json(json.loads(schema), masks), ensure_ascii=False)
    return Constraint(
        json_schema=schema, calls=tuple(masks.text(name) for name in constraint.calls)
    )


def _unknown_choice(choice: object) -> Exception:
    shown = json.dumps(choice)[:96]
    return unsupported("tool_choice", f"{shown} is not supported; name one tool, or leave it out")
