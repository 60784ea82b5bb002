"""One thing that is wrong with a dataset's file: the row, the column, what is wrong, and how the row
begins.

The texts in it come from the file, which may be hostile, so each has a bounded length.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from schemas.errors import Issue

SHOWN_ISSUES = 20
"""Issues of a file that are reported; the check of a file ends with the last of them."""

MAX_KEY, MAX_MESSAGE, MAX_EXCERPT = 300, 600, 100
"""Characters of the place, of what is wrong, and of the excerpt."""


@dataclass(frozen=True, slots=True)
class RowIssue(Issue):
    """An issue of a row. `line` is its line in the file, from 1; None when the issue is one of the file.
    `column` is the column's name in the file, and `excerpt` is how the row begins."""

    line: int | None = None
    column: str | None = None
    excerpt: str | None = None

    def for_text(self) -> Issue:
        """The same issue for clients that show a message alone. It quotes the excerpt."""
        if not self.excerpt:
            return Issue(self.key, self.message)
        return Issue(self.key, f"{self.message}; the row begins with {self.excerpt}")


ISSUES: TypeAdapter[list[RowIssue]] = TypeAdapter(list[RowIssue])


def file_issue(key: str, message: str) -> RowIssue:
    """An issue of a file as a whole."""
    return RowIssue(shorten(key, MAX_KEY), shorten(message, MAX_MESSAGE))


def line_issue(line: int, message: str, text: str) -> RowIssue:
    """An issue of a whole row, whose text begins with `text`."""
    return RowIssue(
        f"line {line}",
        shorten(message, MAX_MESSAGE),
        line=line,
        excerpt=shorten(text.strip(), MAX_EXCERPT),
    )


def excerpt_of(values: object) -> str:
    """The beginning of a row as JSON, whatever it holds."""
    try:
        return shorten(json.dumps(values, ensure_ascii=False), MAX_EXCERPT)
    except RecursionError:
        return ""


def shorten(text: str, most: int) -> str:
    """The first `most` characters of a text. Three dots stand for the rest."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def to_text(issues: Sequence[RowIssue]) -> str:
    """The issues as JSON text, for `from_text`. It has at most 20 issues, and NUL is escaped in it."""
    return ISSUES.dump_json(list(issues[:SHOWN_ISSUES])).decode()


def from_text(text: str | None) -> list[RowIssue]:
    """The issues in a text of `to_text`. A text of another version holds none."""
    try:
        return ISSUES.validate_json(text or "[]")
    except ValidationError:
        return []
