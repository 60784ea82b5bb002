"""Reads the rows of a Parquet file, which is not trusted. Only the confined check does so, because a
reader of Parquet allocates what the counts in a file ask for.

Each row becomes the values that the same row would have in JSON Lines. Only columns that are read are
decoded; the others have no value. The reader needs pyarrow, from the extra `parquet`.
"""

import json
import os
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

from producers.core.datasets.mapping import READ
from producers.core.datasets.readers import MAX_DEPTH, MAX_ROW_BYTES, Values
from producers.core.datasets.row_issues import RowIssue, excerpt_of, file_issue, line_issue

MAGIC = b"PAR1"
MAX_FOOTER_BYTES = 16 << 20
"""The description at the end of the file, which is read as a whole."""
MAX_NAME_BYTES = 1 << 20
MAX_ENTRIES = 200_000
"""Limits of one text and one list in the footer."""
MAX_LEAVES = 2_000
"""The most columns, with those inside of objects."""
MAX_RATIO = 200
"""How many times larger than the file the JSON of its rows may be, beyond SPARE_BYTES. A column of one
repeated text is stored once, so 2 KB can hold 200,000 rows of 1 MB."""
SPARE_BYTES = 32 << 20

BATCH_ROWS = 64
PIECE_BYTES = 1 << 20

Read = Iterator[tuple[int, Values | RowIssue]]


def read_parquet(file: BinaryIO, *, mapped: Collection[str] = ()) -> Read:
    """The rows of a file: pairs of row number and values, or the problem with the row. `mapped` are the
    columns that are read besides those of our own names."""
    if problem := _footer_problem(file):
        yield 1, file_issue("file", problem)
        return
    most = SPARE_BYTES + MAX_RATIO * file.seek(0, os.SEEK_END)
    file.seek(0)
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # others reserve address space
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(
            file,
            buffer_size=PIECE_BYTES,
            pre_buffer=False,
            thrift_string_size_limit=MAX_NAME_BYTES,
            thrift_container_size_limit=MAX_ENTRIES,
        ) as parquet:
            yield from _rows(parquet, {*READ, *mapped}, most=most)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        yield 1, file_issue("file", f"is not a readable Parquet file: {said}; write it again")
    except MemoryError:
        message = "needs too much memory; write it with smaller row groups, or split it"
        yield 1, file_issue("file", message)


def _footer_problem(file: BinaryIO) -> str | None:
    """The problem with the two ends of a file, which say that it is Parquet and how long its
    description is."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(4)
    file.seek(max(0, size - 8))
    tail = file.read(8)
    file.seek(0)
    if size < 12 or head != MAGIC or tail[4:] != MAGIC:
        return "is not a Parquet file, or is cut off; write it again"
    length = int.from_bytes(tail[:4], "little")
    if length > min(MAX_FOOTER_BYTES, size - 12):
        return f"has a footer of {length} bytes, which is too long; write it with fewer columns"
    return None


def _rows(parquet: Any, wanted: Collection[str], *, most: int) -> Read:
    """The rows of an open file, whose JSON may have `most` bytes."""
    if parquet.metadata.num_columns > MAX_LEAVES:
        yield 1, file_issue("file", f"has more than {MAX_LEAVES} columns; leave some out")
        return
    fields = list(parquet.schema_arrow)
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        yield 1, file_issue("file", "names a column twice; rename one of them")
        return
    read = [field for field in fields if field.name in wanted]
    problems = [(field.name, problem) for field in read if (problem := _type_problem(field.type))]
    for name, problem in problems:
        yield 1, RowIssue(f"column {name[:200]}", problem, column=name[:200])
    if problems:
        return
    columns, blank, number, total = [field.name for field in read], dict.fromkeys(names), 0, 0
    if not columns:  # the names alone say which columns are missing
        yield 1, blank
        return
    for batch in parquet.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
        batch.validate(full=True)  # also that texts are UTF-8
        for row in batch.to_pylist():
            number += 1
            found, size = _check_row(number, {**blank, **row})
            total += size
            if total > most:
                message = f"has rows of more than {most} bytes as JSON, {MAX_RATIO} times its size"
                yield number, file_issue("file", f"{message}; split it, or leave out repeated text")
                return
            yield number, found


def _check_row(number: int, values: dict[str, Any]) -> tuple[Values | RowIssue, int]:
    """The values, or the problem that they are not JSON or too long, and the bytes of their JSON."""
    try:
        size = len(json.dumps(values, ensure_ascii=False, allow_nan=False).encode())
    except ValueError:
        column = next(name for name, value in values.items() if not _is_finite(value))
        message = "holds NaN or Infinity, which is not JSON; remove it, or write null"
        key = f"row {number}, column {column}"
        return RowIssue(key, message, line=number, column=column), 0
    if size > MAX_ROW_BYTES:
        message = f"must have at most {MAX_ROW_BYTES} bytes; shorten the row"
        return line_issue(number, message, excerpt_of(values)[:400]), size
    return values, size


def _is_finite(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _type_problem(of: Any, depth: int = 0) -> str | None:
    """The problem with the type of a column, or of what is inside of it."""
    from pyarrow import types

    if depth > MAX_DEPTH:
        return f"is nested deeper than {MAX_DEPTH} levels; flatten it"
    if types.is_struct(of):
        names = [field.name for field in of]
        if len(set(names)) < len(names):
            return "has an object that names a key twice; rename one of them"
        inner = [field.type for field in of]
    elif (
        types.is_list(of)
        or types.is_large_list(of)
        or types.is_fixed_size_list(of)
        or types.is_dictionary(of)
    ):
        inner = [of.value_type]
    elif (
        types.is_null(of)
        or types.is_boolean(of)
        or types.is_integer(of)
        or types.is_floating(of)
        or types.is_string(of)
        or types.is_large_string(of)
    ):
        return None
    else:
        return (
            f"has the type {str(of)[:60]}, which JSON does not have; write it as text or a number"
        )
    return next((found for one in inner if (found := _type_problem(one, depth + 1))), None)
