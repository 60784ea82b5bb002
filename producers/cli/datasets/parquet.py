"""Converts Parquet to JSON Lines on the user's machine, before the upload.

A server without pyarrow reads only text, and of a Parquet file with pictures only the columns that are
read need to be sent. This needs pyarrow, from the extra
`parquet`.
"""

import importlib.util
import json
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from producers.cli.errors import Failure

SUFFIX = ".parquet"
BATCH_ROWS = 1024
COLUMNS = (
    "system_prompt",
    "user_prompt",
    "ground_truth",
    "label",
    "messages",
    "tools",
    "metadata",
    "prompt",
    "chosen",
    "rejected",
    "completion",
    "margin",
)
"""The columns that a dataset uses. Of the other columns of a file, such as pictures, only those that are
mapped are converted."""


@contextmanager
def as_text(file: Path, *, mapped: Collection[str] = ()) -> Iterator[Path]:
    """The file in a form that the server reads: the file itself, or for Parquet a JSON Lines file of the
    same name that is deleted when the block ends. `mapped` are the columns that are read as others.
    Raises Failure when the file cannot be read."""
    if file.suffix.lower() != SUFFIX:
        yield file
        return
    if importlib.util.find_spec("pyarrow") is None:
        how = "pip install 'headrace[parquet]', or convert it to JSON Lines"
        raise Failure("MISSING", f"{file} is a Parquet file, and pyarrow is not installed: {how}")
    with tempfile.TemporaryDirectory(prefix="headrace-parquet-") as directory:
        text = Path(directory) / f"{file.stem}.jsonl"
        _convert(file, text, mapped)
        yield text


def _convert(file: Path, text: Path, mapped: Collection[str]) -> None:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as parquet, text.open("w", encoding="utf-8") as out:
            names = parquet.schema_arrow.names
            columns = [name for name in names if name in COLUMNS or name in mapped] or names
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    out.write(json.dumps(row, default=str) + "\n")
    except (ArrowException, OSError) as error:
        raise Failure("VALIDATION", f"{file} is not a readable Parquet file: {error}") from error
