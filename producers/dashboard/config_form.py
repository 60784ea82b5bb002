"""The keys of a training TOML as fields of a form. They are derived from `schemas/config.py`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from schemas.config import RunConfig, Section
from schemas.toml.page import allowed_values, default_text, meanings

FIRST = ("experiment", "training", "sampling", "checkpoints", "advanced")
NUMBER = re.compile(r"[+-]?(\d+|\d*\.\d+|\d+\.)([eE][+-]?\d+)?")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
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
        if allowed in ("list", "table", "text or list"):
            continue
        choices = tuple(CHOICES.findall(allowed))
        meaning = LINK.sub(r"\1", description[kind.__name__, key]).replace("`", "")
        default = default_text(key, inner).replace("`", "")
        found.append(FormField(f"{section}.{key}", key, allowed, choices, default, meaning))
    return found


def write_toml(fields: Mapping[str, str]) -> str:
    """The TOML of the fields that are filled in."""
    lines: list[str] = []
    for section, keys in form_sections():
        filled = [(one, fields.get(one.name, "").strip()) for one in keys]
        filled = [(one, value) for one, value in filled if value]
        if filled:
            lines += [
                f"[{section}]",
                *(f"{one.key} = {_literal(one, value)}" for one, value in filled),
            ]
            lines.append("")
    return "\n".join(lines)


def _literal(field: FormField, value: str) -> str:
    is_number = "number" in field.allowed and NUMBER.fullmatch(value)
    is_flag = field.choices == ("true", "false") and value in field.choices
    return value if is_number or is_flag else json.dumps(value)
