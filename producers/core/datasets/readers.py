"""Reads the rows of a dataset's file, which is not trusted: one bounded line at a time.

A line that cannot be read is an issue in the place of its row, and JSON Lines are read on after it. In
CSV a row can have several lines, so where the next one begins is not known after a line that cannot be
read; the file ends there.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from producers.core.datasets.row_issues import RowIssue, excerpt_of, line_issue, shorten
from producers.core.datasets.strict_json import loads

MAX_ROW_BYTES = 1 << 20
MAX_DEPTH = 32
EXCERPT_BYTES = 400
"""Bytes of a line that cannot be read, of which the excerpt is made."""

Values = Mapping[str, object]

OTHER_DELIMITERS = (";", "\t", "|")
"""Delimiters that are not read. A header with one of them has one column."""

FORMATS = {".jsonl": "jsonl", ".csv": "csv"}
PARQUET = "parquet"
"""A format that only the confined check reads (`producers/core/datasets/parquet.py`)."""


class LineFile(Protocol):
    """A binary file as far as it is needed here."""

    def readline(self, size: int = -1, /) -> bytes:
        """The next line, or at most `size` bytes of it; nothing at the end."""
        ...


class BadRow(Exception):
    """A row that cannot be read, inside of a reader."""

    def __init__(self, issue: RowIssue) -> None:
        super().__init__(issue.message)
        self.issue = issue


def type_name(value: object) -> str:
    """The name of a value's JSON type. Integers and other numbers are one type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "list" if isinstance(value, list) else "object"


def bounded_lines(file: LineFile) -> Iterator[tuple[int, str | RowIssue]]:
    """The lines of a UTF-8 file: pairs of line number and text, or what is wrong with the line. Memory
    never holds more than one row of the largest allowed size."""
    number = 0
    while data := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        head = data[:EXCERPT_BYTES].decode("utf-8", "replace")
        if len(data) > MAX_ROW_BYTES:
            while data and not data.endswith(b"\n"):
                data = file.readline(MAX_ROW_BYTES)
            message = f"must have at most {MAX_ROW_BYTES} bytes; shorten the row"
            yield number, line_issue(number, message, head)
            continue
        try:
            text = data.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            message = f"is not UTF-8 at byte {error.start + 1}; save the file as UTF-8"
            yield number, line_issue(number, message, head)
        else:
            yield number, text


def read_jsonl(file: LineFile) -> Iterator[tuple[int, Values | RowIssue]]:
    """The rows of a JSON Lines file, as pairs of line number and values, or what is wrong with the row.
    Blank lines are skipped, but they count as lines."""
    for number, text in bounded_lines(file):
        if isinstance(text, RowIssue):
            yield number, text
        elif text.strip():
            yield number, _parse_object(number, text)


def _parse_object(number: int, text: str) -> Values | RowIssue:
    try:
        value = loads(text.rstrip("\r\n"))  # an open string ends before the line break
    except RecursionError:
        message = f"is nested deeper than {MAX_DEPTH} levels; flatten it"
        return line_issue(number, message, text[:EXCERPT_BYTES])
    except ValueError as error:
        return line_issue(number, f"is not JSON: {error}", text[:EXCERPT_BYTES])
    if not isinstance(value, dict):
        message = f"must be a JSON object, one in each line, got {shorten(text.strip(), 60)}"
        return line_issue(number, message, text[:EXCERPT_BYTES])
    return value


def read_csv(file: LineFile) -> Iterator[tuple[int, Values | RowIssue]]:
    """The rows of a CSV file with a header: pairs of line number and values, or what is wrong with the
    row."""
    csv.field_size_limit(MAX_ROW_BYTES)
    try:
        rows = _csv_rows(_texts(file))
        header = next(rows, None)
        if header is None:
            return
        names = header[1]
        if len(set(names)) < len(names):
            message = "names a column twice; rename one of them"
            yield 1, line_issue(1, message, ",".join(names)[:EXCERPT_BYTES])
            return
        others = [one for one in OTHER_DELIMITERS if one in names[0] and len(names) == 1]
        if others:
            message = f"has {others[0]!r} as the delimiter; save the file with commas"
            yield 1, line_issue(1, message, names[0][:EXCERPT_BYTES])
            return
        for number, cells in rows:
            if len(cells) == len(names):
                yield number, dict(zip(names, cells, strict=True))
            else:
                message = f"has {len(cells)} cells; it must have {len(names)}, like the header"
                yield number, line_issue(number, message, excerpt_of(cells))
    except BadRow as bad:
        yield bad.issue.line or 1, bad.issue


def _texts(file: LineFile) -> Iterator[str]:
    for _, text in bounded_lines(file):
        if isinstance(text, RowIssue):
            raise BadRow(text)
        yield text


def _csv_rows(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    last = ""

    def remember_last() -> Iterator[str]:
        nonlocal last
        for text in lines:
            last = text
            yield text

    reader = csv.reader(remember_last(), strict=True)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            number = reader.line_num
            raise BadRow(
                line_issue(number, f"is not CSV: {error}", last[:EXCERPT_BYTES])
            ) from error
        if cells:
            yield reader.line_num, cells


READERS: Mapping[str, Callable[[LineFile], Iterator[tuple[int, Values | RowIssue]]]] = {
    "jsonl": read_jsonl,
    "csv": read_csv,
}
