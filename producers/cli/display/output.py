"""Prints results: as JSON envelopes for programs, and as tables with colours for people.

Rich is imported only when something is drawn. It draws plain text when stdout is a pipe or NO_COLOR is
set. Text from a server is always escaped, because the text of a rollout may be hostile.
"""

import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from producers.cli.errors import Failure
from schemas.errors import Issue
from schemas.secrets.redact import redact

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
Document = dict[str, Any]
"""A JSON object, from a server or for a program that reads our output."""

BARS = "▁▂▃▄▅▆▇█"


Part = str | Callable[[], None] | Iterable["Part"] | None
"""A part of an Output for people: lines, a function that prints it, or parts of its own, which are not
made for programs. None is left out."""


class Output:
    """The result of a command: a document for programs, parts for people, and then the failure."""

    def __init__(
        self,
        document: Mapping[str, object],
        *parts: Part,
        failure: Failure | None = None,
        exit_code: int = 0,
    ) -> None:
        self._document = document
        self._parts = parts
        self._failure = failure
        self._exit_code = exit_code

    def print(self, *, as_json: bool) -> int:
        """Print it, and return the exit code. Raises its failure."""
        if as_json:
            print_json(self._document)
        else:
            _print_part(self._parts)
        if self._failure is not None:
            raise self._failure
        return self._exit_code


def _print_part(part: Part) -> None:
    if isinstance(part, str):
        say(part)
    elif callable(part):
        part()
    else:
        for one in part or ():
            _print_part(one)


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    empty: str | None = None,
) -> Part:
    """A table as a part of an Output, or the text `empty` if there are no rows."""
    return partial(print_table, title, columns, rows) if rows or empty is None else empty


def fields(title: str, pairs: Sequence[tuple[str, object]]) -> Part:
    """Names and values as a part of an Output."""
    return partial(print_fields, title, pairs)


def note(text: str) -> Part:
    """A line about a result as a part of an Output. It goes to stderr, so that stdout is the result
    alone: KEY=$(headrace key create ci)."""
    return partial(say_aside, text)


def say_aside(text: str) -> None:
    """Print a line for people that is not a part of the result."""
    sys.stderr.write(printable(text) + "\n")
    sys.stderr.flush()


def print_json(document: Mapping[str, object]) -> None:
    """Print a success to stdout."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **document}, ensure_ascii=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_failure(code: str, message: str, issues: Sequence[Issue] = (), *, as_json: bool) -> None:
    """Print a failure to stderr, with passwords removed from everything that it quotes."""
    message = redact(message)
    if as_json:
        listed = [
            {"key": i.key, "message": i.message, "did_you_mean": i.did_you_mean} for i in issues
        ]
        error = {"code": code, "message": message, "issues": listed}
        document = {"schema_version": SCHEMA_VERSION, "error": error}
        sys.stderr.write(json.dumps(document, ensure_ascii=False) + "\n")
        return
    sys.stderr.write(f"Error: {printable(_first_line(message, issues))}\n")
    for issue in issues:
        if len(issues) > 1 or issue.message not in message:
            line = f"{issue.key}: {issue.message}{_suggestion(issue)}"
            sys.stderr.write(f"  - {printable(line)}\n")


def _first_line(message: str, issues: Sequence[Issue]) -> str:
    """The first line of a failure. The message of a refusal quotes its first issue, which is left out
    here when all issues are listed below."""
    quoted = issues[0].message in message if issues else False
    if not quoted:
        return message
    if len(issues) == 1:
        meant = issues[0].did_you_mean
        return message + (_suggestion(issues[0]) if meant and meant not in message else "")
    before = message.partition(issues[0].key)[0] if issues[0].key in message else ""
    return f"{before.strip(' :') or 'refused'}: {len(issues)} problems"


def _suggestion(issue: Issue) -> str:
    return f" (did you mean {issue.did_you_mean}?)" if issue.did_you_mean else ""


PIPE_COLUMNS = 120


def console() -> "Console":
    """The console for people, with the colours and width of the terminal. Both dimensions are passed to
    Rich, because it otherwise assumes 80 columns for a terminal without capabilities. In a pipe the
    width is that of the variable COLUMNS, or 120."""
    from rich.console import Console

    if not sys.stdout.isatty():
        return Console(highlight=False, width=int(os.environ.get("COLUMNS", str(PIPE_COLUMNS))))
    columns, lines = shutil.get_terminal_size((PIPE_COLUMNS, 24))
    return Console(highlight=False, width=columns, height=lines)


def say(text: str) -> None:
    """Print a line for people."""
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()


def say_warnings(answer: Document) -> None:
    """Print the warnings in a server's response."""
    for warning in answer.get("warnings") or ():
        say(f"warning: {warning}")


def printable(text: str) -> str:
    """`text` without control characters, because hostile text must not control the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf"))


def one_line(text: str, *, limit: int = 80) -> str:
    flat = " ".join(printable(text).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table. None is shown as a dash."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title or None, title_justify="left", header_style="bold")
    for column in columns:
        drawn.add_column(column, overflow="fold")  # a name that is cut off cannot be copied
    for row in rows:
        drawn.add_row(*(Text(cell_text(value)) for value in row))
    console().print(drawn)


def print_fields(title: str, pairs: Sequence[tuple[str, object]]) -> None:
    """Print names and values, one pair per line. Pairs whose value is None are left out."""
    shown = [(name, value) for name, value in pairs if value is not None]
    print_table(title, ("", ""), shown) if shown else say(title)


def cell_text(value: object) -> str:
    """The text that shows a value to people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping | list | tuple):
        return one_line(json.dumps(value, ensure_ascii=False, default=str))
    return printable(str(value))


def time_ago(moment: object) -> str | None:
    """How long ago an ISO time was: `5 min ago`."""
    if not isinstance(moment, str) or not moment:
        return None
    seconds = (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """The values as a row of at most `width` bars; neighbouring values are averaged."""
    if not values:
        return ""
    size = -(-len(values) // width)
    chunks = [values[i : i + size] for i in range(0, len(values), size)]
    means = [sum(chunk) / len(chunk) for chunk in chunks]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)
