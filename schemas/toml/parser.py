"""Turns a parsed TOML file into a config, or reports all of its mistakes at once, each with its key and
a suggestion.

This module checks each key by itself: that it exists, its type, and its bounds. The bounds are written
only in `schemas/config.py`, and `schemas/toml/violations.py` describes their violations. Keys that
contradict each other are checked by `schemas/toml/config_issues.py`. Both modules are reached through
`producers/core/validation/validate.py`.
"""

import difflib
import json
from collections.abc import Mapping
from itertools import islice
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from schemas.config import EvalConfig, RunConfig
from schemas.errors import InvalidConfig, Issue
from schemas.toml.key_hints import hint
from schemas.toml.violations import (
    UNIONS,
    ErrorDetails,
    describe_violation,
    join_key,
    meant_value,
    non_json_issues,
    quote,
    shorten,
    union_at,
)

C = TypeVar("C", RunConfig, EvalConfig)

ALIKE, OWN_SECTION = 0.75, 0.1
"""How similar a key must be to be suggested, and the bonus for a key of the same section."""
MOST_LISTED = 20
"""A section with at most so many keys is listed when no key is similar."""
MOST_ISSUES = 100
"""The most issues that are reported at once."""


def parse_run(data: Mapping[str, object]) -> RunConfig:
    """The config in a parsed training TOML. Raises InvalidConfig with the issues of all keys."""
    return _parse(data, RunConfig, "training")


def parse_eval(data: Mapping[str, object]) -> EvalConfig:
    """The config in a parsed evaluation TOML. Raises InvalidConfig with the issues of all keys."""
    return _parse(data, EvalConfig, "evaluation")


def refuse(what: str, issues: tuple[Issue, ...]) -> InvalidConfig:
    """The error that carries these issues. Its message quotes the first one."""
    return InvalidConfig(f"invalid {what} config: {summarize(issues)}", issues=issues)


def summarize(issues: tuple[Issue, ...]) -> str:
    """The first issue in one line, and how many more there are."""
    first = issues[0]
    more = f" (and {len(issues) - 1} more)" if len(issues) > 1 else ""
    meant = f"; did you mean {first.did_you_mean}?" if first.did_you_mean else ""
    return f"{first.key}: {first.message}{meant}{more}"


def _parse(data: Mapping[str, object], model: type[C], what: str) -> C:
    if issues := tuple(islice(non_json_issues("", data), MOST_ISSUES)):
        raise refuse(what, issues)
    try:
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise refuse(what, _issues(error, model)) from error


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
    location = tuple(shorten(part) for part in details["loc"])
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
        return Issue(join_key(location), "is missing; add it")
    section = model.model_fields.get(str(location[0])) if location else None
    if len(location) == 1 and section is not None:
        return Issue(
            str(location[0]), f"must be a table [{location[0]}], got {quote(details['input'])}"
        )
    if (key := union_at(location)) is not None:
        got = quote(details["input"])
        return Issue(join_key(location), f"must be {UNIONS[key]}, got {got}")
    message = describe_violation(details)
    if kind == "tuple_type" and isinstance(details["input"], dict) and _table_at(location, model):
        message = f"must be a list; write [[{join_key(location)}]]"
    return Issue(join_key(location), message, meant_value(details))


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
    if len(location) > 2:
        return _unrecognized_in_a_table(location, model)
    if name in keys:
        return Issue(join_key(location), "unrecognized key", keys[name])
    if meant := hint(name, keys.values()):
        return Issue(join_key(location), "unrecognized key", meant)
    likeness = {
        full: difflib.SequenceMatcher(None, name, key).ratio()
        + (OWN_SECTION if full.startswith(f"{section}.") else 0.0)
        for key, full in keys.items()
    }
    best = max(likeness, key=lambda full: likeness[full])
    if likeness[best] < ALIKE:
        own = _keys_of(model, section)
        use = (
            f"use one of {', '.join(own)}"
            if len(own) <= MOST_LISTED
            else "use one of those in docs/config.md"
        )
        return Issue(join_key(location), f"unrecognized key; {use}")
    return Issue(join_key(location), "unrecognized key", best)


def _unrecognized_in_a_table(location: tuple[Any, ...], model: type[BaseModel]) -> Issue:
    """The issue of a key in a table within a section. Only the keys of that table are suggested."""
    *place, name = location
    table = _table_at(tuple(place), model)
    own = {join_key((*place, key)): key for key in table.model_fields} if table else {}
    meant = hint(str(name), own)
    if meant is None:
        close = difflib.get_close_matches(str(name), own.values(), n=1, cutoff=ALIKE - OWN_SECTION)
        meant = join_key((*place, close[0])) if close else None
    if meant is not None:
        return Issue(join_key(location), "unrecognized key", meant)
    use = f"one of {', '.join(own.values())}" if own else "one of those in docs/config.md"
    return Issue(join_key(location), f"unrecognized key; use {use}")


def _table_at(location: tuple[Any, ...], model: type[BaseModel]) -> type[BaseModel] | None:
    """The model of the table, or of the tables in the list, at this place. None if there is none."""
    found: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int):
            continue
        field = found.model_fields.get(str(part)) if found else None
        found = _table_in(field.annotation) if field else None
    return found


def _table_in(annotation: Any) -> type[BaseModel] | None:
    """The first model in a type, such as `Curriculum | None` or `tuple[RewardWeight, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_table_in, get_args(annotation))), None)


def _known_keys(model: type[BaseModel]) -> dict[str, str]:
    """Key -> `section.key`. If several sections have the key, the first one counts."""
    found: dict[str, str] = {}
    for section in model.model_fields:
        for key in _keys_of(model, section):
            found.setdefault(key, f"{section}.{key}")
    return found


def _keys_of(model: type[BaseModel], section: str) -> tuple[str, ...]:
    kind = model.model_fields[section].annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return tuple(kind.model_fields)
    return ()
