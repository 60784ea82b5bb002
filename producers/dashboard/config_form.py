"""The keys of a training TOML as fields of a form. They are derived from `schemas/config.py`."""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import tomli_w

from schemas.config import RunConfig, Section
from schemas.toml.page import allowed_values, default_text, meanings

FIRST = ("experiment", "training", "sampling", "checkpoints", "advanced")
NUMBER = re.compile(r"[+-]?(\d+|\d*\.\d+|\d+\.)([eE][+-]?\d+)?")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
REWARDS = "advanced.rewards"
RUBRIC_KEYS = ("text", "model", "weight")
NUM_RUBRICS = 3
LONGEST_NUMBER = 30
CHOICES = re.compile(r"`([^`]*)`")


@dataclass(frozen=True, slots=True)
class FormField:
    """A key: its name in the form, the values that it allows in words, its choices if they are few, its
    default, and its meaning."""

    name: str
    key: str
    allowed: str
    choices: tuple[str, ...]
    default: str
    meaning: str


@cache
def form_sections() -> tuple[tuple[str, tuple[FormField, ...]], ...]:
    """The sections of a training TOML with their keys. Tables and lists are left to the text."""
    found = []
    for name in FIRST:
        kind = RunConfig.model_fields[name].annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found.append((name, tuple(_fields(name, kind))))
    return tuple(found)


def _fields(section: str, kind: type[Section]) -> list[FormField]:
    description, found = meanings(), []
    for key, inner in kind.model_fields.items():
        allowed = allowed_values(inner)
        if allowed in ("list", "table", "text or list", "number or text"):
            continue
        choices = tuple(CHOICES.findall(allowed))
        meaning = LINK.sub(r"\1", description[kind.__name__, key]).replace("`", "")
        default = default_text(key, inner).replace("`", "")
        found.append(FormField(f"{section}.{key}", key, allowed, choices, default, meaning))
    return found


def write_toml(fields: Mapping[str, str], former: Mapping[str, Any] | None = None) -> str:
    """The TOML of the fields that are filled in. Of the `former` document it keeps what has no field,
    and what a field cannot show and does not replace."""
    found: dict[str, Any] = copy.deepcopy(dict(former or {}))
    for section, keys in form_sections():
        values = found.get(section)
        table: dict[str, Any] = values if isinstance(values, dict) else {}
        for one in keys:
            if value := fields.get(one.name, "").strip():
                table[one.key] = _value(one, value)
            elif one.key in table and is_shown(table[one.key]):
                del table[one.key]
        if table:
            found[section] = table
    advanced = found.setdefault("advanced", {})
    if isinstance(advanced, dict):
        _write_rewards(fields.get(REWARDS, ""), advanced)
        _write_rubrics(fields, advanced)
    return tomli_w.dumps({section: keys for section, keys in found.items() if keys != {}})


def _write_rewards(text: str, advanced: dict[str, Any]) -> None:
    if rewards := _rewards(text):
        advanced["rewards"] = rewards
    elif _reward_lines(advanced.get("rewards")) is not None:
        advanced.pop("rewards", None)


def _write_rubrics(fields: Mapping[str, str], advanced: dict[str, Any]) -> None:
    """Put the rubrics of the fields in place of the first ones, with the keys of those that have no
    field."""
    former = _tables(advanced.get("rubrics"))
    found: list[Mapping[str, Any]] = []
    for number in range(max(NUM_RUBRICS, len(former))):
        before = former[number] if number < len(former) else {}
        others = {key: value for key, value in before.items() if key not in RUBRIC_KEYS}
        if number < NUM_RUBRICS and (filled := _rubric(fields, number)):
            found.append({**others, **filled})
        elif before and (number >= NUM_RUBRICS or not _is_shown_rubric(before)):
            found.append(before)
    if found:
        advanced["rubrics"] = found
    elif former:
        del advanced["rubrics"]


def lost_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The keys of a document that another one does not have, with dots between their parts."""
    found: list[str] = []
    for key, value in before.items():
        if key not in after:
            found.append(key)
        elif isinstance(value, dict):
            inner = after[key] if isinstance(after[key], dict) else {}
            found += [f"{key}.{one}" for one in lost_keys(value, inner)]
        elif isinstance(value, list) and isinstance(after[key], list):
            found += [f"{key}[{n}]" for n in range(len(after[key]), len(value))]
    return found


def is_shown(value: object) -> bool:
    """Whether a field can show a value as it is: a number, or a text of one line without spaces around
    it."""
    if isinstance(value, str):
        return value == value.strip() and value.isprintable()
    return isinstance(value, int | float) and abs(value) < 2**63


def _is_shown_rubric(rubric: Mapping[str, Any]) -> bool:
    """Whether the fields of a rubric can show it. Its criteria may have several lines."""
    others = [rubric[key] for key in RUBRIC_KEYS[1:] if key in rubric]
    return isinstance(rubric.get("text"), str) and all(is_shown(value) for value in others)


@cache
def field_names() -> frozenset[str]:
    """The names of all fields. An error of a config names its field by the same text."""
    plain = {one.name for _, keys in form_sections() for one in keys}
    rubrics = {rubric_field(n, key) for n in range(NUM_RUBRICS) for key in RUBRIC_KEYS}
    return frozenset(plain | rubrics | {REWARDS})


def read_toml(config: Mapping[str, Any]) -> dict[str, str]:
    """The fields that a TOML fills in. What has no field is left out."""
    found: dict[str, str] = {}
    for section, keys in form_sections():
        values = config.get(section)
        if isinstance(values, dict):
            found |= {
                one.name: _text(values[one.key])
                for one in keys
                if one.key in values and is_shown(values[one.key])
            }
    advanced = config.get("advanced")
    lists = advanced if isinstance(advanced, dict) else {}
    found[REWARDS] = _reward_lines(lists.get("rewards")) or ""
    for number, one in enumerate(_tables(lists.get("rubrics"))[:NUM_RUBRICS]):
        found |= {
            rubric_field(number, key): _text(one[key])
            for key in RUBRIC_KEYS
            if key in one and _is_shown_rubric(one)
        }
    return found


def _reward_lines(rewards: object) -> str | None:
    """Reward functions in lines like `exact = 1.0`; None when such lines cannot hold all of them."""
    found = []
    for one in rewards if isinstance(rewards, list) else ():
        name, weight = (
            (one.get("name"), one.get("weight", 1.0)) if isinstance(one, dict) else (0, 0)
        )
        is_plain = isinstance(name, str) and is_shown(name) and is_shown(weight) and "=" not in name
        if not is_plain or not name or len(one) > len({"name", "weight"} & set(one)):
            return None
        found.append(f"{name} = {weight}")
    return "\n".join(found)


def rubric_field(number: int, key: str) -> str:
    """The name of a field of a rubric. It is the key that an error about it has."""
    return f"advanced.rubrics[{number}].{key}"


def _rewards(text: str) -> list[dict[str, Any]]:
    """The reward functions in lines like `exact = 1.0`; a line without a weight has the weight 1."""
    found = []
    for line in text.splitlines():
        name, _, weight = (part.strip() for part in line.partition("="))
        if name:
            found.append({"name": name, "weight": _number(weight or "1.0")})
    return found


def _rubric(fields: Mapping[str, str], number: int) -> dict[str, Any]:
    """A rubric whose criteria are filled in; empty otherwise."""
    found = {
        key: fields.get(rubric_field(number, key), "").replace("\r\n", "\n").strip()
        for key in RUBRIC_KEYS
    }
    if not found["text"]:
        return {}
    values: dict[str, Any] = {key: value for key, value in found.items() if value}
    return {**values, "weight": _number(found["weight"] or "1.0")}


def _tables(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _value(field: FormField, text: str) -> Any:
    """The value of a field as the TOML holds it. A text that is not a number stays a text, and the check
    of the config says what is wrong with it."""
    if field.choices == ("true", "false"):
        return text == "true" if text in field.choices else text
    return _number(text) if "number" in field.allowed else text


def _number(text: str) -> int | float | str:
    if not NUMBER.fullmatch(text) or len(text) > LONGEST_NUMBER:
        return text
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
