"""The first rows of a dataset's file as objects, with the file's own columns."""

import csv
import json
from collections.abc import Mapping, Sequence

NUM_ROWS = 20
"""A list of first rows has at most this many."""

MOST_CHARACTERS = 1 << 20


def parse_first_rows(lines: Sequence[bytes], kind: str) -> list[Mapping[str, object]]:
    """The rows in the first lines of a file of `kind` that was checked before. It has fewer of them
    where rows are long, or have several lines."""
    texts = [line.decode("utf-8-sig", "replace") for line in lines]
    rows = (
        _csv_rows(texts) if kind == "csv" else [json.loads(text) for text in texts if text.strip()]
    )
    found: list[Mapping[str, object]] = []
    left = MOST_CHARACTERS
    for row in rows[:NUM_ROWS]:
        left -= len(json.dumps(row, default=str))
        if left < 0:
            break
        found.append(row)
    return found


def _csv_rows(texts: Sequence[str]) -> list[Mapping[str, object]]:
    rows: list[Mapping[str, object]] = []
    reader = csv.reader(
        [text if text.endswith("\n") else f"{text}\n" for text in texts], strict=True
    )
    try:
        names = next(reader, [])
        for cells in reader:
            if cells:
                rows.append(dict(zip(names, cells, strict=False)))
    except csv.Error:
        return rows  # the last line ends inside of a row
    return rows
