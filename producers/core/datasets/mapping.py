"""Renames the columns of a file, so that a public dataset can be read as it is (`--map
question=user_prompt`).

A mapping says which column of the file is read as which of our columns. It is recorded with the dataset,
whose `columns` are the names after mapping.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

from schemas.datasets import (
    OPTIONAL_COLUMNS,
    PREFERENCE_COLUMNS,
    TRAJECTORY_COLUMNS,
    preference_form,
)
from schemas.errors import InvalidConfig, Issue

LABELLED = (
    "user_prompt",
    "system_prompt",
    "ground_truth",
    "label",
    "messages",
    "tools",
    "metadata",
)
"""The columns of a file without preferences. `label` is read only if there is no `ground_truth`."""
READ = (*LABELLED, "prompt", "chosen", "rejected", "completion", "margin")
"""The columns that are read in some file."""
MAX_BYTES = 16 << 10

Columns = Mapping[str, str]
"""The name of a column in the file -> our name for it."""


def mapping_of(value: object) -> dict[str, str]:
    """The mapping in the JSON of a request. Raises InvalidConfig when it is not one."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value.values()):
        raise _invalid_mapping('must be an object of names, like {"question": "user_prompt"}')
    targets = list(value.values())
    for target in targets:
        if target not in READ:
            raise _invalid_mapping(
                f"maps to {target!r}, which nothing reads; map to one of: {', '.join(READ)}"
            )
        if targets.count(target) > 1:
            raise _invalid_mapping(f"maps two columns to {target}; keep one of them")
    if not all(value):
        raise _invalid_mapping("has a column with an empty name; name the column")
    return {str(source): str(target) for source, target in value.items()}


def from_query(text: str | None) -> dict[str, str]:
    """The mapping in a query parameter, which is a JSON object. Raises InvalidConfig when it is not
    one."""
    if not text:
        return {}
    try:
        value = json.loads(text[:MAX_BYTES])
    except (ValueError, RecursionError) as error:
        raise _invalid_mapping(f"must be a JSON object, got {text[:40]!r}") from error
    return mapping_of(value)


def as_query(mapping: Columns) -> str:
    """The query string for `from_query`. It is empty for an empty mapping."""
    return f"?mapping={quote(json.dumps(dict(mapping)), safe='')}" if mapping else ""


def rename_columns(values: Mapping[str, object], mapping: Columns) -> Mapping[str, object]:
    """A row with its columns renamed."""
    if not mapping:
        return values
    return {mapping.get(name, name): value for name, value in values.items()}


def mapping_problems(columns: Sequence[str], mapping: Columns) -> Iterator[str]:
    """The mistakes of a mapping for a file with these columns."""
    missing = [f"{s} to map to {target}" for s, target in mapping.items() if s not in columns]
    if missing:
        yield f"has no column {' and no '.join(missing)}; it has: {', '.join(columns) or 'none'}"
    for source, target in mapping.items():
        if source in columns and target in columns and target not in mapping:
            yield f"already has a column {target}; map that column to another name, or rename it"


def unread(columns: Sequence[str]) -> list[str]:
    """The columns that nothing reads."""
    if tuple(columns) == TRAJECTORY_COLUMNS:
        return []
    if form := preference_form(columns):
        read = {*PREFERENCE_COLUMNS[form], *OPTIONAL_COLUMNS[form], "tools", "metadata"}
    else:
        read = set(LABELLED) - ({"label"} if "ground_truth" in columns else set())
    return [name for name in columns if name not in read]


def _invalid_mapping(message: str) -> InvalidConfig:
    return InvalidConfig(f"mapping {message}", issues=(Issue("mapping", message),))
