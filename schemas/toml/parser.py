"""Turns a parsed TOML file into a config, or reports all of its mistakes at once, each with its key and
a suggestion.

This module checks each key by itself: that it exists, its type, and its bounds. The bounds are written
only in `schemas/config.py`. This module describes their violations in sentences. Keys that contradict
each other are checked by `schemas/toml/config_issues.py`. Both modules are reached through
`producers/core/validation/validate.py`.
"""

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from schemas.config import EvalConfig, RunConfig
from schemas.errors import InvalidConfig, Issue
from schemas.toml.key_hints import hint

C = TypeVar("C", RunConfig, EvalConfig)
ErrorDetails = Mapping[str, Any]
"""One error as pydantic reports it: type, loc, msg, input, ctx."""

ALIKE, OWN_SECTION = 0.75, 0.1
"""How similar a key must be to be suggested, and the bonus for a key of the same section."""
MOST_ISSUES = 100
"""The most issues that are reported at once."""

LONGEST = 64
"""Characters of a key that are compared and quoted."""

LORA_TARGETS = ("advanced", "lora_targets")
"""The one key that may hold either of two types. Pydantic reports an error for each of them."""


def parse_run(data: Mapping[str, object]) -> RunConfig:
    """The config in a parsed training TOML. Raises InvalidConfig with the issues of all keys."""
    return _parse(data, RunConfig, "training")


def parse_eval(data: Mapping[str, object]) -> EvalConfig:
    """The config in a parsed evaluation TOML. Raises InvalidConfig with the issues of all keys."""
    return _parse(data, EvalConfig, "evaluation")


def refuse(what: str, issues: tuple[Issue, ...]) -> InvalidConfig:
    """The error that carries these issues. Its message quotes the first one."""
    first = issues[0]
    more = f" (and {len(issues) - 1} more)" if len(issues) > 1 else ""
    meant = f"; did you mean {first.did_you_mean}?" if first.did_you_mean else ""
    return InvalidConfig(
        f"invalid {what} config: {first.key}: {first.message}{meant}{more}", issues=issues
    )


def _parse(data: Mapping[str, object], model: type[C], what: str) -> C:
    if issues := tuple(islice(_non_json_issues("", data), MOST_ISSUES)):
        raise refuse(what, issues)
    try:
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise refuse(what, _issues(error, model)) from error


def _non_json_issues(key: str, value: object) -> Iterator[Issue]:
    """Issues with values that TOML has but JSON does not, and that none of our keys takes: dates, inf,
    nan."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not _is_text(name):
                yield Issue(
                    key or "config",
                    f"has a key that is not text, {ascii(name)[:60]}; correct its encoding",
                )
            else:
                yield from _non_json_issues(f"{key}.{_shorten(name)}".lstrip("."), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _non_json_issues(f"{key}[{index}]", inner)
    elif isinstance(value, float) and not math.isfinite(value):
        yield Issue(key, f"must be a finite number, got {value}")
    elif isinstance(value, str) and not _is_text(value):
        yield Issue(key, "must be text, got a lone surrogate; correct its encoding")
    elif value is not None and not isinstance(value, str | int | float | bool):
        yield Issue(key, f"must not be a date or a time, got {value}; put it in quotes")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _issues(error: ValidationError, model: type[BaseModel]) -> tuple[Issue, ...]:
    """One issue per key. Pydantic reports the same key once per member of a union."""
    found: dict[str, Issue] = {}
    for details in error.errors(include_url=False):
        if len(found) == MOST_ISSUES:
            break
        issue = _issue(details, model)
        found.setdefault(issue.key, issue)
    return tuple(found.values())


def _issue(details: ErrorDetails, model: type[BaseModel]) -> Issue:
    location = tuple(_shorten(part) for part in details["loc"])
    kind = details["type"]
    if kind == "extra_forbidden":
        return _unrecognized_issue(location, details["input"], model)
    if location[:1] == ("env",) and location[-1] == "[key]":
        return Issue(
            f"env.{location[1]}", "is not the name of a variable; use A-Z, 0-9 and _, like API_HOST"
        )
    if kind == "missing":
        if len(location) == 1:
            return Issue(str(location[0]), f"is missing; add the section [{location[0]}]")
        return Issue(_key(location), "is missing; add it")
    section = model.model_fields.get(str(location[0])) if location else None
    if len(location) == 1 and section is not None:
        return Issue(
            str(location[0]), f"must be a table [{location[0]}], got {_quote(details['input'])}"
        )
    if location[:2] == LORA_TARGETS:
        got = _quote(details["input"])
        return Issue(_key(location), f"must be a string or a list of strings, got {got}")
    return Issue(_key(location), _sentence(details), _meant_value(details))


def _shorten(part: Any) -> Any:
    """A part of a key, cut to LONGEST characters, because the time to compare it with known names grows
    with its length, and because error messages quote it."""
    return part if not isinstance(part, str) or len(part) <= LONGEST else f"{part[:LONGEST]}..."


def _unrecognized_issue(location: tuple[Any, ...], value: object, model: type[BaseModel]) -> Issue:
    keys = _known_keys(model)
    name = str(location[-1])
    if len(location) == 1:
        sections = list(model.model_fields)
        close = difflib.get_close_matches(name, sections, n=1)
        if isinstance(value, dict):
            message = f"unrecognized section; the sections are: {', '.join(sections)}"
            return Issue(name, message, close[0] if close else None)
        elsewhere = keys.get(name) or hint(name, keys.values())
        message = "unrecognized key outside of a section; move it into a section"
        return Issue(name, message, elsewhere)
    section = str(location[0])
    if name in keys and len(location) == 2:
        return Issue(_key(location), "unrecognized key", keys[name])
    if len(location) == 2 and (meant := hint(name, keys.values())):
        return Issue(_key(location), "unrecognized key", meant)
    likeness = {
        full: difflib.SequenceMatcher(None, name, key).ratio()
        + (OWN_SECTION if full.startswith(f"{section}.") else 0.0)
        for key, full in keys.items()
    }
    best = max(likeness, key=lambda full: likeness[full])
    if likeness[best] < ALIKE:
        return Issue(_key(location), "unrecognized key; use one of those in docs/config.md")
    return Issue(_key(location), "unrecognized key", best)


def _known_keys(model: type[BaseModel]) -> dict[str, str]:
    """Key -> `section.key`. If several sections have the key, the first one counts."""
    found: dict[str, str] = {}
    for section, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for key in kind.model_fields:
                found.setdefault(key, f"{section}.{key}")
    return found


def _key(location: tuple[Any, ...]) -> str:
    """`("advanced", "rewards", 0, "name")` becomes `advanced.rewards[0].name`. The name of a union's
    member is not part of a key."""
    if location[:2] == LORA_TARGETS:
        location = LORA_TARGETS
    key = ""
    for part in location:
        key += f"[{part}]" if isinstance(part, int) else f".{part}"
    return key.lstrip(".")


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
}
PATTERNS = {
    "rollout": "must be a name of lower-case letters, digits, - and _",
    "commit_sha": "must be 7 to 40 hex digits",
    "branch": "must be a branch's name without white space",
    "required": "must be a name of A-Z, 0-9 and _",
}


def _sentence(details: ErrorDetails) -> str:
    kind, got = details["type"], _quote(details["input"])
    if kind in KINDS:
        return f"{KINDS[kind]}, got {got}"
    if kind in BOUNDS:
        bounds = {name: f"{bound:g}" for name, bound in details["ctx"].items()}
        return f"{BOUNDS[kind].format(**bounds)}, got {got}"
    if kind == "literal_error":
        return f"must be one of {details['ctx']['expected']}, got {got}"
    if kind == "string_pattern_mismatch":
        named = [PATTERNS[part] for part in details["loc"] if part in PATTERNS]
        pattern = details["ctx"]["pattern"]
        return f"{named[0] if named else f'must match {pattern}'}, got {got}"
    return f"is invalid: {details['msg']}, got {got}"


def _meant_value(details: ErrorDetails) -> str | None:
    if details["type"] != "literal_error" or not isinstance(details["input"], str):
        return None
    options = [option.strip("' ") for option in details["ctx"]["expected"].split(",")]
    options = [part.strip("' ") for option in options for part in option.split(" or ")]
    close = difflib.get_close_matches(details["input"], options, n=1)
    return close[0] if close else None


def _quote(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
