"""The rules of a dataset file, and its normalised form: JSON Lines of `schemas.datasets.DatasetRow`.

The columns choose one of two modes. In *prompt* mode a file has `user_prompt` and `ground_truth` (or
`label`), and optionally `system_prompt`. Instead it may have `messages`, a whole conversation
(`producers/core/datasets/messages.py`), or preferences between answers
(`producers/core/datasets/preferences.py`). Other columns are allowed. They are not passed on, and are
reported to the user. A file with a `metadata` column is in *metadata* mode: every row has a JSON object
in that column, and the prompt columns are optional. Each column has one type, and there are at least
four rows. The file is untrusted, so it is read one bounded line at a time.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from producers.core.datasets.mapping import mapping_problems, rename_columns
from producers.core.datasets.messages import BadMessages, parse_conversation, parse_tools
from producers.core.datasets.parquet import read_parquet
from producers.core.datasets.preferences import BadPreference, header_problem, parse_preference
from producers.core.datasets.readers import MAX_DEPTH, PARQUET, READERS, Values, type_name
from producers.core.datasets.row_issues import (
    MAX_KEY,
    MAX_MESSAGE,
    SHOWN_ISSUES,
    RowIssue,
    excerpt_of,
    file_issue,
    shorten,
)
from producers.core.datasets.strict_json import loads
from schemas.datasets import DatasetRow, PreferenceForm, preference_form
from schemas.sampling import Message, ToolSpec

MAX_ROWS = 5_000_000
MAX_COLUMNS = 256
MAX_NAME = 2000
"""Characters of the name of a column."""
MAX_NAMES_BYTES = 60_000
"""Bytes of the names of all columns in JSON. The event of the dataset holds them."""
MIN_ROWS = 4
MAX_CHARACTERS = 512
INT64 = 2**63

PROMPT_COLUMNS = ("user_prompt", "ground_truth")
LABELS = ("ground_truth", "label")
SHAREGPT = "conversations"
"""The column in which public datasets of ShareGPT's form have their messages."""


@dataclass
class FileReport:
    """The result of a check. `issues` holds the first twenty problems. A file without issues is a valid
    dataset. `characters` holds the first 512 characters of prompts and labels, in sorted order."""

    num_rows: int = 0
    columns: tuple[str, ...] = ()
    issues: list[RowIssue] = field(default_factory=list)
    characters: str = ""

    @property
    def full(self) -> bool:
        return len(self.issues) >= SHOWN_ISSUES

    def add(self, where: str, message: str) -> None:
        """Report a problem of the file as a whole."""
        self.add_issue(file_issue(where, message))

    def add_issue(self, issue: RowIssue) -> None:
        if not self.full:
            self.issues.append(issue)


def check_file(
    path: Path,
    kind: str,
    write: Callable[[bytes], object],
    *,
    mapping: Mapping[str, str] | None = None,
) -> FileReport:
    """Check a file of `kind` jsonl, csv or parquet. `write` is called with each valid row as a
    normalised line. `mapping` renames columns (`producers/core/datasets/mapping.py`)."""
    report, named = FileReport(), mapping or {}
    rules = Rules(report, named, json_cells=kind == "csv")
    with path.open("rb") as file:
        rows = read_parquet(file, mapped=named) if kind == PARQUET else READERS[kind](file)
        for line, values in rows:
            if isinstance(values, RowIssue):
                report.add_issue(values)
            elif not rules.accept(line, values, write):
                break
            if report.full:
                break
    if not report.issues:
        rules.close()
    return report


class Rules:
    """Checks the rows of a file one after the other, with the rules that compare rows."""

    def __init__(
        self, report: FileReport, mapping: Mapping[str, str], *, json_cells: bool = False
    ) -> None:
        self._report = report
        self._json_cells = json_cells
        self._mapping = mapping
        self._current: Values = {}
        self._sources = {target: source for source, target in mapping.items()}
        self._characters: set[str] = set()
        self._types: dict[str, tuple[str, int]] = {}
        self._columns: tuple[str, ...] | None = None
        self._label: str | None = None
        self._form: PreferenceForm | None = None

    def accept(self, line: int, read: Values, write: Callable[[bytes], object]) -> bool:
        """Check a row, as it is in the file, and write it. Returns False when the rest of the file
        cannot be checked."""
        self._current = read
        values = rename_columns(read, self._mapping)
        if self._columns is None and not (self._has_mapped(read) and self._header(values)):
            return False
        if self._report.num_rows >= MAX_ROWS:
            self._report.add("file", f"has more than {MAX_ROWS} rows; split it")
            return False
        before = len(self._report.issues)
        self._same_columns(line, values)
        if len(self._report.issues) == before:
            row = self._row(line, values)
            if row is not None and len(self._report.issues) == before:
                write(row.to_line())
                calls = (call for message in row.prompt for call in message.tool_calls)
                self._characters.update(row.label or "", row.chosen or "", row.rejected or "")
                self._characters.update(*(m.content for m in row.prompt))
                self._characters.update(*(call.arguments for call in calls))
        self._report.num_rows += 1
        return True

    def close(self) -> None:
        """Check the rules about the file as a whole, after its last row."""
        rows = self._report.num_rows
        self._report.characters = "".join(sorted(self._characters)[:MAX_CHARACTERS])
        if rows == 0:
            self._report.add("file", "is empty; a dataset needs at least 4 rows")
        elif rows < MIN_ROWS:
            word = "row" if rows == 1 else "rows"
            self._report.add("file", f"has {rows} {word}; a dataset needs at least {MIN_ROWS}")

    def _at(self, line: int, path: str) -> str:
        """A place in the file, for a message. It uses the column's name in the file."""
        name, dot, rest = path.partition(".")
        if name not in self._sources:
            return f"line {line}, column {path}"
        return f"line {line}, column {self._sources[name]}{dot}{rest} (mapped to {name})"

    def _refuse(self, line: int, path: str, message: str) -> None:
        """Report a problem of a column in the current row."""
        if self._report.full:
            return
        name, dot, rest = path.partition(".")
        issue = RowIssue(
            shorten(self._at(line, path), MAX_KEY),
            shorten(message, MAX_MESSAGE),
            line=line,
            column=shorten(f"{self._sources.get(name, name)}{dot}{rest}", MAX_KEY),
            excerpt=excerpt_of(self._current),
        )
        self._report.add_issue(issue)

    def _has_mapped(self, values: Values) -> bool:
        """Whether the first row has the columns of the mapping."""
        misfits = list(mapping_problems(tuple(values), self._mapping))
        for misfit in misfits:
            self._report.add("file", misfit)
        return not misfits

    def _header(self, values: Values) -> bool:
        self._columns = tuple(values)
        self._report.columns = self._columns
        self._label = next((name for name in LABELS if name in values), None)
        if len(values) > MAX_COLUMNS:
            self._report.add(
                "file", f"has {len(values)} columns; a dataset may have at most {MAX_COLUMNS}"
            )
            return False
        if long := next((name for name in self._current if len(name) > MAX_NAME), None):
            self._report.add(
                "file",
                f"has a column whose name has {len(long)} characters, {shorten(long, 60)!r}; shorten "
                f"it to at most {MAX_NAME}",
            )
            return False
        size = len(json.dumps(list(self._current), ensure_ascii=False).encode())
        if size > MAX_NAMES_BYTES:
            self._report.add(
                "file",
                f"has names of columns of {size} bytes in all; shorten them to at most "
                f"{MAX_NAMES_BYTES}",
            )
            return False
        if problem := header_problem(self._columns):
            self._report.add("file", problem)
            return False
        self._form = preference_form(self._columns)
        if self._form is not None:
            return True
        if "messages" in values and {"user_prompt", "system_prompt"} & set(values):
            self._report.add("file", "has messages and prompt columns; keep one of the two forms")
            return False
        if "metadata" in values or "messages" in values:
            return True
        missing = [name for name in PROMPT_COLUMNS if name not in values]
        if self._label is not None and "ground_truth" in missing:
            missing.remove("ground_truth")
        if missing:
            found = ", ".join(values) or "none"
            self._report.add(
                "file",
                f"missing required columns: {', '.join(missing)}; {_hint(missing, values)}; it has: "
                f"{found}",
            )
        return not missing

    def _same_columns(self, line: int, values: Values) -> None:
        expected = self._columns or ()
        for name in expected:
            if name not in values:
                self._refuse(
                    line, name, "is missing, and the first row has it; add it, or remove the row"
                )
        for name in values:
            if name not in expected:
                self._refuse(line, name, "is not in the first row; use one set of columns")

    def _row(self, line: int, values: Values) -> DatasetRow | None:
        metadata: dict[str, object] = {}
        if "metadata" in values:
            found = self._metadata(line, values["metadata"])
            if found is None:
                return None
            metadata = dict(found)
        for name in values:
            if name != "metadata":
                self._one_type(line, name, values[name])
        if self._form is not None:
            return self._preference(line, values, metadata, self._form)
        if "messages" in values:
            return self._conversation(line, values, metadata)
        prompt = []
        for name, role in (("system_prompt", "system"), ("user_prompt", "user")):
            text = self._text(line, name, values, optional=name == "system_prompt")
            if text:
                prompt.append(Message.model_validate({"role": role, "content": text}))
        label = None
        if self._label is not None:
            label = self._scalar(line, self._label, values[self._label])
        return DatasetRow(prompt=tuple(prompt), label=label, metadata=metadata)

    def _conversation(
        self, line: int, values: Values, metadata: dict[str, object]
    ) -> DatasetRow | None:
        label = None
        if self._label is not None:
            label = self._scalar(line, self._label, values[self._label])
        try:
            prompt, answer = parse_conversation(
                values["messages"], labelled=self._label is not None
            )
        except BadMessages as bad:
            self._refuse(line, "messages", str(bad))
            return None
        tools = self._tools(line, values)
        if tools is None:
            return None
        return DatasetRow(prompt=prompt, label=answer or label, metadata=metadata, tools=tools)

    def _preference(
        self, line: int, values: Values, metadata: dict[str, object], form: PreferenceForm
    ) -> DatasetRow | None:
        try:
            row = parse_preference(values, form, json_cells=self._json_cells)
        except BadPreference as bad:
            self._refuse(line, bad.column, str(bad))
            return None
        tools = self._tools(line, values)
        if tools is None:
            return None
        return DatasetRow(
            prompt=row.prompt,
            metadata=metadata,
            tools=tools,
            chosen=row.chosen,
            rejected=row.rejected,
            margin=row.margin,
        )

    def _tools(self, line: int, values: Values) -> tuple[ToolSpec, ...] | None:
        try:
            return parse_tools(values.get("tools"))
        except BadMessages as bad:
            self._refuse(line, "tools", str(bad))
            return None

    def _text(self, line: int, name: str, values: Values, *, optional: bool) -> str | None:
        if name not in values:
            return None
        value = values[name]
        if value is None and optional:
            return None
        if not isinstance(value, str):
            self._refuse(line, name, f"must be a string, got {_quote(value)}")
        elif not value.strip() and not optional:
            self._refuse(line, name, "is empty")
        else:
            return value
        return None

    def _scalar(self, line: int, name: str, value: object) -> str | None:
        if isinstance(value, str):
            if value == "":
                self._refuse(line, name, "is empty")
            return value
        if isinstance(value, bool | int | float):
            return json.dumps(value)
        self._refuse(line, name, f"must be a string or a number, got {_quote(value)}")
        return None

    def _metadata(self, line: int, value: object) -> Mapping[str, object] | None:
        if isinstance(value, str):
            try:
                value = loads(value)
            except (ValueError, RecursionError):
                self._refuse(line, "metadata", f"is not a JSON object: {_quote(value)}")
                return None
        if not isinstance(value, dict) or not value:
            self._refuse(
                line, "metadata", f"must be an object with at least one key, got {_quote(value)}"
            )
            return None
        before = len(self._report.issues)
        self._paths(line, "metadata", value, depth=0)
        return value if len(self._report.issues) == before else None

    def _paths(self, line: int, path: str, value: object, *, depth: int) -> None:
        """Check for one type per key path over all rows, and for nothing empty, too deep or too wide."""
        if depth > MAX_DEPTH:
            self._refuse(line, path, f"is nested deeper than {MAX_DEPTH} levels; flatten it")
        elif isinstance(value, dict):
            if not value:
                self._refuse(line, path, "is an empty object; give it a key, or leave it out")
            for key, inner in value.items():
                self._paths(line, f"{path}.{key}", inner, depth=depth + 1)
        else:
            self._one_type(line, path, value)

    def _one_type(self, line: int, path: str, value: object) -> None:
        if isinstance(value, int) and not -INT64 <= value < INT64:
            self._refuse(
                line, path, f"does not fit in 64 bits, got {_quote(value)}; write it as text"
            )
        kind = type_name(value)
        if kind == "null":
            return
        first, at = self._types.setdefault(path, (kind, line))
        if first != kind and len(self._types) <= MAX_COLUMNS * MAX_DEPTH:
            self._refuse(
                line, path, f"is a {kind} and was a {first} in line {at}; use one type per column"
            )


def _hint(missing: list[str], values: Values) -> str:
    """How the columns of a file can be read that lacks some."""
    if SHAREGPT in values:
        return "read it with --map conversations=messages"
    if "completion" in values:
        maps = "--map prompt=user_prompt --map completion=ground_truth"
        return f"add the column label (true or false) for kto, or read them for sft with {maps}"
    for name in missing:
        if close := difflib.get_close_matches(name, values, n=1, cutoff=0.8):
            return f"did you mean {name} instead of {close[0]}? Rename it"
    maps = " ".join(f"--map COLUMN={name}" for name in missing)
    return f"read other columns as these with {maps}"


def _quote(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
