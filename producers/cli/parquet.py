"""Parquet on its way to the server: made JSON Lines here, on the machine of whoever has the file.

The server reads text alone: a reader of Parquet believes the counts in its file, which a hostile one
forges. The user's own file is the user's risk. Needs pyarrow, which the extra `parquet` brings.
"""

import importlib.util
import json
import tempfile
from collections.abc import Iterator
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
    "metadata",
)
"""The columns that a dataset is made of; the others of a file (pictures, say) stay where they are."""


@contextmanager
def as_text(file: Path) -> Iterator[Path]:
    """The file as the server reads it: itself, or for Parquet a JSON Lines file of the same name that
    goes when the block ends. Raises Failure when it cannot be read."""
    if file.suffix.lower() != SUFFIX:
        yield file
        return
    if importlib.util.find_spec("pyarrow") is None:
        how = "pip install 'headrace[parquet]', or convert it to JSON Lines"
        raise Failure("MISSING", f"reading {file} needs pyarrow: {how}")
    with tempfile.TemporaryDirectory(prefix="headrace-parquet-") as directory:
        text = Path(directory) / f"{file.stem}.jsonl"
        _convert(file, text)
        yield text


def _convert(file: Path, text: Path) -> None:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as parquet, text.open("w", encoding="utf-8") as out:
            names = parquet.schema_arrow.names
            columns = [name for name in names if name in COLUMNS] or names
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    out.write(json.dumps(row, default=str) + "\n")
    except (ArrowException, OSError) as error:
        raise Failure("VALIDATION", f"{file} cannot be read as Parquet: {error}") from error
