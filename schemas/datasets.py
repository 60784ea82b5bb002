"""A dataset row, as it is stored after its dataset was validated and normalised to JSON Lines."""

from pydantic import Field

from schemas.sampling import Message, ToolSpec, Value


class DatasetRow(Value):
    """One row. `label` is the ground truth, which only graders and SFT see. `tools` are those that the
    conversation of a demonstration offers."""

    prompt: tuple[Message, ...]
    label: str | None = None
    metadata: dict[str, object] = Field(default_factory=dict)
    tools: tuple[ToolSpec, ...] = Field(default=(), exclude_if=lambda value: not value)

    def to_line(self) -> bytes:
        """The row as one line of the normalised content, newline included."""
        return self.model_dump_json().encode() + b"\n"


def parse_rows(content: bytes) -> tuple[DatasetRow, ...]:
    """Normalised content -> rows. Raises ValueError on anything else."""
    return tuple(DatasetRow.model_validate_json(line) for line in content.splitlines() if line)
