"""A dataset row, as it is stored after its dataset was validated and normalised to JSON Lines."""

from collections.abc import Collection
from typing import Literal

from pydantic import Field

from schemas.sampling import Message, ToolSpec, Value

LABELLED_COLUMNS = frozenset({"user_prompt", "system_prompt", "messages", "ground_truth"})
"""The columns of rows that hold a prompt and a label. A file with one of them has no preferences."""

PreferenceForm = Literal["paired", "binary"]
"""`paired`: a row has a chosen and a rejected answer. `binary`: it has one answer, and whether that is
desirable."""

PREFERENCE_COLUMNS: dict[PreferenceForm, tuple[str, ...]] = {
    "paired": ("prompt", "chosen", "rejected"),
    "binary": ("prompt", "completion", "label"),
}

OPTIONAL_COLUMNS: dict[PreferenceForm, tuple[str, ...]] = {"paired": ("margin",), "binary": ()}
"""Columns that rows of preferences may have besides."""


def _is_unset(value: object) -> bool:
    return value is None


class DatasetRow(Value):
    """One row. `label` is the ground truth, which only graders and SFT see. `tools` are those that the
    conversation of a demonstration offers. A row of preferences has no label: `chosen` is its better
    or desirable answer, `rejected` its worse or undesirable one, and `margin` by how much their rewards
    should differ."""

    prompt: tuple[Message, ...]
    label: str | None = None
    metadata: dict[str, object] = Field(default_factory=dict)
    tools: tuple[ToolSpec, ...] = Field(default=(), exclude_if=lambda value: not value)
    chosen: str | None = Field(default=None, exclude_if=_is_unset)
    rejected: str | None = Field(default=None, exclude_if=_is_unset)
    margin: float | None = Field(default=None, exclude_if=_is_unset)

    def to_line(self) -> bytes:
        """The row as one line of the normalised content, newline included."""
        return self.model_dump_json().encode() + b"\n"


def parse_rows(content: bytes) -> tuple[DatasetRow, ...]:
    """Normalised content -> rows. Raises ValueError on anything else."""
    return tuple(DatasetRow.model_validate_json(line) for line in content.splitlines() if line)


def preference_form(columns: Collection[str]) -> PreferenceForm | None:
    """The form of the preferences in a file with these columns; None if it has none. Public datasets of
    pairs have the chosen answer in a column `messages` too, which is not read there."""
    names = set(columns)
    if {"chosen", "rejected"} <= names:
        return None if names & (LABELLED_COLUMNS - {"messages"}) else "paired"
    if names & LABELLED_COLUMNS or not {"completion", "label"} <= names:
        return None
    return "binary" if "prompt" in names or "metadata" not in names else None
