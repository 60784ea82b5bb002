"""Tools that a request offers: their form, their bounds, and their secrets.

The definition of a tool becomes part of the prompt, so it is bounded before anything is made of it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from infra.model_api.wire.errors import invalid
from schemas.sampling import ToolSpec
from schemas.secrets.masking import Masks

MOST_TOOLS = 128
LONGEST_DESCRIPTION = 16 << 10
LARGEST_SCHEMA = 64 << 10
LARGEST_TOOLS = 256 << 10
"""Characters of the schema of one tool, and of all definitions of a request."""
DEEPEST_SCHEMA = 32
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def check_tools(tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
    """Return the tools of a request. Raises GatewayError when there are too many, or two have one
    name."""
    if len(tools) > MOST_TOOLS:
        raise invalid("tools", f"there are {len(tools)}; offer at most {MOST_TOOLS}")
    names = [tool.name for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise invalid(f"tools.{number}.name", f"{name} is defined twice; rename one of them")
    size = sum(len(tool.name) + len(tool.description) + len(tool.parameters) for tool in tools)
    if size > LARGEST_TOOLS:
        raise invalid(
            "tools", f"the definitions have {size} characters; at most {LARGEST_TOOLS} are allowed"
        )
    return tuple(tools)


def tool_spec(where: str, *, name: object, description: object, schema: object) -> ToolSpec:
    """Return the definition of one tool, whose place in the request is `where`. Raises GatewayError when
    it is not a definition, or too large."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise invalid(
            f"{where}.name", f"a name has 1 to 128 of the characters {NAME.pattern.split('{')[0]}"
        )
    if description is not None and not isinstance(description, str):
        raise invalid(f"{where}.description", "must be a text")
    if len(description or "") > LONGEST_DESCRIPTION:
        raise invalid(f"{where}.description", f"has more than {LONGEST_DESCRIPTION} characters")
    if schema is not None and not isinstance(schema, dict):
        raise invalid(f"{where}.parameters", "must be a JSON Schema object")
    return ToolSpec(
        name=name, description=description or "", parameters=_parameters_text(where, schema or {})
    )


def _parameters_text(where: str, schema: Mapping[str, object]) -> str:
    """Return the schema of a tool as JSON text. Raises GatewayError when it is too deep, too large or
    recursive, because templates write it out."""
    text = schema_text(f"{where}.parameters", schema)
    if '"$ref"' in text and _is_recursive(schema):
        raise invalid(
            f"{where}.parameters",
            "the schema is recursive, because a $ref leads back to itself; write the levels out",
        )
    return text


def schema_text(where: str, schema: Mapping[str, object]) -> str:
    """Return a schema as JSON text. Raises GatewayError when it is too deep or too large."""
    if _depth(schema) > DEEPEST_SCHEMA:
        raise invalid(where, f"the schema is nested more than {DEEPEST_SCHEMA} levels deep")
    text = json.dumps(schema, ensure_ascii=False)
    if len(text) > LARGEST_SCHEMA:
        raise invalid(
            where, f"the schema has {len(text)} characters; at most {LARGEST_SCHEMA} are allowed"
        )
    return text


def _depth(value: object) -> int:
    """How many objects and lists contain each other, at most one more than is allowed."""
    level, depth = [value], 0
    while level and depth <= DEEPEST_SCHEMA:
        level = [child for each in level for child in _children(each)]
        depth += 1
    return depth


def _children(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _is_recursive(schema: Mapping[str, object]) -> bool:
    """Whether a $ref of the schema leads back to itself. Its time grows linearly with the schema, times
    DEEPEST_SCHEMA at most."""
    finished: set[str] = set()
    inside: dict[int, set[str]] = {}

    def references_in(target: object) -> set[str]:
        """Many references may name one target, which is searched once."""
        if id(target) not in inside:
            inside[id(target)] = _references(target)
        return inside[id(target)]

    def leads_back(reference: str, path: frozenset[str]) -> bool:
        if reference in path or len(path) > DEEPEST_SCHEMA:
            return True
        if reference in finished:
            return False
        target = _target(schema, reference)
        found = any(leads_back(inner, path | {reference}) for inner in references_in(target))
        finished.add(reference)
        return found

    return any(leads_back(reference, frozenset()) for reference in references_in(schema))


def _references(value: object) -> set[str]:
    """The targets of all $ref inside of a value."""
    found: set[str] = set()
    if isinstance(value, dict) and isinstance(value.get("$ref"), str):
        found.add(value["$ref"])
    return found.union(*(_references(child) for child in _children(value)))


def _target(schema: Mapping[str, object], reference: str) -> object:
    """The part of the schema that a reference like `#/$defs/node` names; None if there is none."""
    found: object = schema
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found if reference.startswith("#") else None


def mask_tool(tool: ToolSpec, masks: Masks) -> ToolSpec:
    """Return a tool with the secrets masked, also in the texts of its schema."""
    schema = json.dumps(mask_json(json.loads(tool.parameters), masks), ensure_ascii=False)
    return ToolSpec(
        name=masks.text(tool.name), description=masks.text(tool.description), parameters=schema
    )


def mask_json(value: object, masks: Masks) -> object:
    """Return a JSON value with the secrets masked in every text."""
    if isinstance(value, dict):
        return {masks.text(key): mask_json(child, masks) for key, child in value.items()}
    if isinstance(value, list):
        return [mask_json(child, masks) for child in value]
    if value is None or isinstance(value, bool):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    masked = masks.text(text)
    return value if masked == text else masked
