"""The text of a tool's result or error, as the model gets it. It is always bounded."""

import dataclasses
import enum
import json
from pathlib import PurePath

LONGEST_ERROR = 1_000
"""Characters of an error that the model gets."""

MARGIN = 4
"""How many bytes or parts are looked at for each character that is kept."""


class ToolError(RuntimeError):
    """A tool raises this to tell the model what went wrong. The model gets only the text of the error,
    without the name of its class."""


def result_text(value: object, *, most: int) -> str:
    """Return the text of a result, of at most `most` characters. Text stays as it is, and other values
    become JSON. Raises TypeError or ValueError when a value is not JSON."""
    if isinstance(value, str):
        return shorten(value, most)
    if isinstance(value, bytes | bytearray):
        return shorten(bytes(value[: most * MARGIN]).decode(errors="replace"), most)
    return shorten(_encode(value, most), most)


def error_text(what: str) -> str:
    """Return the text of an error, for the model."""
    return shorten(f"error: {what}", LONGEST_ERROR)


def shorten(text: str, most: int) -> str:
    """Return `text`, or its beginning with a note when it has more than `most` characters."""
    if len(text) <= most:
        return text.encode(errors="replace").decode()
    note = f"... (cut after {most} characters)"
    kept = text[: max(0, most - len(note))]
    return (kept.encode(errors="replace").decode() + note)[:most]


def _encode(value: object, most: int) -> str:
    """The JSON of a value. Stops soon after `most` characters, however large the value is."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value, default=_plain)
    encoder = json.JSONEncoder(ensure_ascii=False, default=_plain)
    parts: list[str] = []
    length = 0
    for part in encoder.iterencode(value):
        parts.append(part[: most * MARGIN])
        length += len(parts[-1])
        if length > most * MARGIN:
            break
    return "".join(parts)


def _plain(value: object) -> object:
    """Return a value that `json` can encode instead of one that it does not know."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return list(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, PurePath) or hasattr(value, "isoformat"):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
