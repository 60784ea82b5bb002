"""Describes the violations of a key's type and bounds in sentences. The parsers of runs, evaluations and
triggers use them.
"""

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from schemas.config import FailedRewards
from schemas.errors import Issue

ErrorDetails = Mapping[str, Any]
"""One error as pydantic reports it: type, loc, msg, input, ctx."""

LONGEST = 64
"""Characters of a key that are compared and quoted."""

FAILED_REWARD = "a number from -1000000 to 1000000, 'drop' or 'grade'"

UNIONS: dict[tuple[str, ...], str] = {
    ("advanced", "lora_targets"): "a string or a list of strings",
    ("advanced", "failed_reward"): FAILED_REWARD,
    **{("advanced", "failed_rewards", name): FAILED_REWARD for name in FailedRewards.model_fields},
}
"""The keys that may hold values of several types, and what they must be. Pydantic reports an error for
each type."""


def union_at(location: tuple[Any, ...]) -> tuple[str, ...] | None:
    """The key of UNIONS at which pydantic reports an error, or None."""
    return next((key for key in UNIONS if location[: len(key)] == key), None)


def non_json_issues(key: str, value: object) -> Iterator[Issue]:
    """Issues with values that none of our keys takes: dates, inf and nan, which JSON does not have, and
    text that cannot be stored."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not _is_text(name):
                yield Issue(
                    key or "config",
                    f"has a key that is not text, {ascii(name)[:60]}; correct its encoding",
                )
            else:
                yield from non_json_issues(f"{key}.{shorten(name)}".lstrip("."), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from non_json_issues(f"{key}[{index}]", inner)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Issue(key, f"must be a finite number, got {value}")
    elif isinstance(value, str) and not _is_text(value):
        yield Issue(key, "must be text, got a lone surrogate; correct its encoding")
    elif isinstance(value, str) and "\0" in value:
        yield Issue(key, "must be text without the character U+0000; remove it")
    elif value is not None and not isinstance(value, str | int | float | bool):
        yield Issue(key, f"must not be a date or a time, got {value}; put it in quotes")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def shorten(part: Any) -> Any:
    """A part of a key, cut to LONGEST characters, because the time to compare it with known names grows
    with its length, and because error messages quote it."""
    return part if not isinstance(part, str) or len(part) <= LONGEST else f"{part[:LONGEST]}..."


def join_key(location: tuple[Any, ...]) -> str:
    """`("advanced", "rewards", 0, "name")` becomes `advanced.rewards[0].name`. The name of a union's
    member is not part of a key."""
    location = union_at(location) or location
    key = ""
    for part in location:
        key += f"[{part}]" if isinstance(part, int) else f".{part}"
    return key.lstrip(".")


OWN_CHECK = "own_check"
"""The type of the errors that `violation` makes."""


def violation(sentence: str) -> PydanticCustomError:
    """An error for a validator of ours to raise. `sentence` says what the value must be."""
    return PydanticCustomError(OWN_CHECK, "{sentence}", {"sentence": sentence})


KINDS = {
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "string_too_short": "must not be empty",
}
BOUNDS = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "must have at most {max_length} characters",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least one entry",
}
PATTERNS = {
    "rollout": "must be a name of lower-case letters, digits, - and _",
    "commit_sha": "must be 7 to 40 hex digits",
    "branch": "must be a branch's name without white space",
    "required": "must be a name of A-Z, 0-9 and _",
}


def describe_violation(details: ErrorDetails) -> str:
    kind, got = details["type"], quote(details["input"])
    if kind in KINDS:
        return f"{KINDS[kind]}, got {got}"
    if kind in BOUNDS:
        bounds = {
            name: bound if isinstance(bound, str | None) else f"{bound:g}"
            for name, bound in details["ctx"].items()
        }
        return f"{BOUNDS[kind].format(**bounds)}, got {got}"
    if kind == OWN_CHECK:
        return f"{details['msg']}, got {got}"
    if kind == "literal_error":
        return f"must be one of {details['ctx']['expected']}, got {got}"
    if kind == "string_pattern_mismatch":
        named = [PATTERNS[part] for part in details["loc"] if part in PATTERNS]
        pattern = details["ctx"]["pattern"]
        return f"{named[0] if named else f'must match {pattern}'}, got {got}"
    return f"is invalid: {details['msg']}, got {got}"


def meant_value(details: ErrorDetails) -> str | None:
    if details["type"] != "literal_error" or not isinstance(details["input"], str):
        return None
    options = [option.strip("' ") for option in details["ctx"]["expected"].split(",")]
    options = [part.strip("' ") for option in options for part in option.split(" or ")]
    given = details["input"].lower()
    swapped = [option for option in options if sorted(option) == sorted(given)]
    close = swapped or difflib.get_close_matches(given, options, n=1)
    return close[0] if close else None


def quote(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
