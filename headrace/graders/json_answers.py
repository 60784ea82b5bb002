"""Rewards for answers that are JSON of a given schema."""

import importlib
import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from headrace.graders.answers import after_last, truth_of
from headrace.graders.schema_subset import is_valid
from headrace.rewards import reward

FENCE = "```"
MOST_CHARACTERS = 1 << 20
"""A longer answer counts as wrong."""


@reward
def json_schema(
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, object] | None = None,
    **kwargs: object,
) -> float:
    """Return 1.0 if the answer holds JSON that is valid by a JSON Schema.

    The schema is `schema` in the row's metadata (an object, or JSON text), or else the ground truth.
    The answer is JSON as a whole, or has it in its last fenced block, or between its first and its last
    bracket. If the rollout's environment has the package `jsonschema`, that decides. Without it,
    `headrace.graders.schema_subset` decides, which refuses keywords that it does not know.

    >>> json_schema('{"age": 7}', '{"type": "object", "required": ["age"]}')
    1.0
    """
    given = (extra_info or {}).get("schema") or truth_of(ground_truth)
    schema = _parse_schema(given) if isinstance(given, str) else given
    if not isinstance(schema, Mapping | bool):
        raise ValueError("the schema of this row is not an object; give a JSON Schema")
    try:
        value = find_json(solution_str)
    except ValueError:
        return 0.0
    try:
        package: Any = importlib.import_module("jsonschema")
    except ImportError:
        return float(is_valid(value, schema))
    return float(bool(package.validators.validator_for(schema)(schema).is_valid(value)))


def find_json(text: str) -> object:
    """Return the JSON value that a text holds. Raises ValueError if there is none.

    >>> find_json("Here it is: [1, 2].")
    [1, 2]
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"the answer has {len(text)} characters; at most {MOST_CHARACTERS} are read"
        )
    candidates = [text]
    head, closed, _ = text.rpartition(FENCE)
    if closed and (block := after_last(head, FENCE, most=len(text))) is not None:
        first, _, rest = block.partition("\n")
        candidates += [block, rest] if first.strip() else [rest]
    begins = [place for place in (text.find("{"), text.find("[")) if place >= 0]
    end = max(text.rfind("}"), text.rfind("]"))
    if begins and end > min(begins):
        candidates.append(text[min(begins) : end + 1])
    for candidate in candidates:
        try:
            found: object = json.loads(candidate, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError):
            continue
        return found
    raise ValueError("the answer holds no JSON; answer with one JSON value")


def _parse_schema(text: str) -> object:
    try:
        schema: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"the schema of this row is not JSON: {text[:80]!r}; correct it"
        ) from error
    return schema


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text[:80])


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON; write a number")
