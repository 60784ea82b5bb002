"""Statistics of a dataset's file, from its first rows: types, lengths and values of its columns, and
prompts that occur twice.

The file is read row by row, and it may be hostile. Rows, bytes and time are limited, and so is what is
kept of them: 32 columns, eight short values of each, and 16 bytes of each prompt. A row that cannot be
read is counted and skipped.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from producers.core.datasets.mapping import Columns, rename_columns
from producers.core.datasets.readers import READERS, LineFile, Values, type_name
from producers.core.datasets.row_issues import RowIssue, shorten
from producers.core.datasets.strict_json import loads
from schemas.datasets import preference_form

MOST_ROWS = 20_000
MOST_BYTES = 32 << 20
MOST_S = 1.0
MOST_COLUMNS = 32
FEW_VALUES = 8
MAX_NAME, MAX_VALUE = 80, 40
"""Characters of the name of a column, and of a value that is counted."""

TURN_S, REST_S = 0.005, 0.001
"""Seconds of work after which the thread rests, so that other threads of the process are not kept
waiting, and seconds of rest."""

PROMPT_COLUMNS = ("system_prompt", "user_prompt", "messages")

Cut = Literal["rows", "bytes", "time"]
"""The limit at which counting ended."""


@dataclass(frozen=True, slots=True)
class TextLengths:
    """Characters of the texts of a column."""

    least: int
    mean: float
    largest: int


@dataclass(frozen=True, slots=True)
class ValueCount:
    """A value of a column as text, and the rows that have it."""

    value: str
    rows: int


@dataclass(frozen=True, slots=True)
class ColumnStatistics:
    """One column. `types` are the JSON types of its values, with the rows of each. `share` is the share
    of rows that have a value there: neither missing, nor null, nor an empty text. `values` is None when
    there are many values, or long ones."""

    name: str
    types: tuple[ValueCount, ...]
    share: float
    lengths: TextLengths | None
    values: tuple[ValueCount, ...] | None


@dataclass(frozen=True, slots=True)
class DatasetStatistics:
    """The first `rows` rows. `cut` is the limit at which counting ended; None: at the end of the file.
    `unread` rows could not be read, and are not among `rows`. `duplicates` rows have the prompt of an
    earlier row; None when no row has a prompt."""

    rows: int
    cut: Cut | None
    unread: int
    columns: tuple[ColumnStatistics, ...]
    more_columns: int
    duplicates: int | None


class _Head:
    """The beginning of a file, up to the limits on bytes and time."""

    def __init__(self, file: LineFile, clock: Callable[[], float]) -> None:
        self._file = file
        self._clock = clock
        self._left = MOST_BYTES
        self._end = clock() + MOST_S
        self._turn_end = clock() + TURN_S
        self.cut: Cut | None = None

    def readline(self, size: int = -1, /) -> bytes:
        now = self._clock()
        if now >= self._turn_end:
            time.sleep(REST_S)
            self._turn_end = self._clock() + TURN_S
        data = self._file.readline(size)
        if data and now >= self._end:
            self.cut = "time"
        elif data and self._left <= 0:
            self.cut = "bytes"
        self._left -= len(data)
        return b"" if self.cut else data


@dataclass
class _Column:
    """The counts of a column while rows are read."""

    types: Counter[str] = field(default_factory=Counter)
    num_filled: int = 0
    num_texts: int = 0
    characters: int = 0
    least: int = 0
    largest: int = 0
    values: Counter[str] | None = field(default_factory=Counter)

    def add(self, value: object) -> None:
        kind = type_name(value)
        self.types[kind] += 1
        if value is None:
            return
        if isinstance(value, str):
            self._add_text(value)
        if value == "":
            return
        self.num_filled += 1
        if self.values is not None:
            self._count(value)

    def _add_text(self, text: str) -> None:
        length = len(text)
        self.least = length if not self.num_texts else min(self.least, length)
        self.largest = max(self.largest, length)
        self.characters += length
        self.num_texts += 1

    def _count(self, value: object) -> None:
        if isinstance(value, list | dict):
            self.values = None
            return
        text = value if isinstance(value, str) else json.dumps(value)
        if self.values is None or len(text) > MAX_VALUE:
            self.values = None
            return
        self.values[text] += 1
        if len(self.values) > FEW_VALUES:
            self.values = None

    def result(self, name: str, rows: int) -> ColumnStatistics:
        lengths = None
        if self.num_texts:
            lengths = TextLengths(self.least, self.characters / self.num_texts, self.largest)
        return ColumnStatistics(
            name=shorten(name, MAX_NAME),
            types=_by_rows(self.types),
            share=self.num_filled / rows,
            lengths=lengths,
            values=_by_rows(self.values) if self.values else None,
        )


def compute_statistics(
    file: LineFile,
    kind: str,
    *,
    mapping: Columns,
    clock: Callable[[], float] = time.monotonic,
) -> DatasetStatistics:
    """The statistics of a file of `kind` jsonl or csv, within the limits. `mapping` renames its columns.
    It works for at most about a second, so call it in a thread."""
    head = _Head(file, clock)
    columns: dict[str, _Column] = {}
    prompts: set[bytes] = set()
    rows = unread = with_prompt = 0
    more: set[int] = set()
    for _, read in READERS[kind](head):
        if isinstance(read, RowIssue):
            unread += head.cut is None
            continue
        if rows >= MOST_ROWS:
            head.cut = "rows"
            break
        rows += 1
        values = rename_columns(read, mapping)
        for name, value in values.items():
            if name in columns or len(columns) < MOST_COLUMNS:
                columns.setdefault(name, _Column()).add(value)
            elif len(more) < MOST_ROWS:
                more.add(hash(name))
        digest = _prompt_digest(values)
        if digest is not None:
            with_prompt += 1
            prompts.add(digest)
    return DatasetStatistics(
        rows=rows,
        cut=head.cut,
        unread=unread,
        columns=tuple(column.result(name, rows) for name, column in columns.items()),
        more_columns=len(more),
        duplicates=with_prompt - len(prompts) if with_prompt else None,
    )


def _prompt_digest(values: Values) -> bytes | None:
    """16 bytes that are equal for rows with equal prompts; None for a row without one. The last message
    of a conversation without a label is its answer and not a part of the prompt."""
    prompt = {name: values[name] for name in PROMPT_COLUMNS if values.get(name)}
    if not prompt and preference_form(values) and values.get("prompt"):
        prompt = {"prompt": values["prompt"]}
    if not prompt:
        return None
    try:
        if isinstance(said := prompt.get("messages"), str):
            prompt["messages"] = said = loads(said)
        if isinstance(said, list) and not {"ground_truth", "label"} & set(values):
            prompt["messages"] = said[:-1]
        text = json.dumps(prompt, sort_keys=True)
    except (ValueError, RecursionError):
        return None
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _by_rows(counted: Mapping[str, int]) -> tuple[ValueCount, ...]:
    """The most frequent first."""
    found = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    return tuple(ValueCount(value, rows) for value, rows in found)
