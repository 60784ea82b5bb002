"""Dataset rows, parsed once per content and process. Recorded groups are parsed when they are used."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import overload

from infra.spine.ports.artifacts import Artifacts
from schemas.datasets import DatasetRow, parse_rows
from schemas.specs import DatasetRef

KEPT = 4
"""How many datasets stay parsed in memory."""


class UnparsedRows(Sequence[DatasetRow]):
    """Rows that stay the bytes of their file, because a row of recorded tokens is many times larger
    when it is parsed. A step reads few of them, and each a few times in a run."""

    def __init__(self, content: bytes) -> None:
        self._lines = content.splitlines()

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> DatasetRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DatasetRow]: ...
    def __getitem__(self, index: int | slice) -> DatasetRow | Sequence[DatasetRow]:
        if isinstance(index, slice):
            return tuple(map(DatasetRow.model_validate_json, self._lines[index]))
        return DatasetRow.model_validate_json(self._lines[index])


class DatasetCache:
    """`infra.ports.services.Datasets` over artifacts."""

    def __init__(self, artifacts: Artifacts) -> None:
        self._artifacts = artifacts
        self._parsed: OrderedDict[str, Sequence[DatasetRow]] = OrderedDict()

    async def rows(self, ref: DatasetRef) -> Sequence[DatasetRow]:
        key = ref.content.sha256
        if key not in self._parsed:
            content = await self._artifacts.get_artifact(ref.content)
            self._parsed[key] = rows_of(content)
        self._parsed.move_to_end(key)
        while len(self._parsed) > KEPT:
            self._parsed.popitem(last=False)
        return self._parsed[key]


def rows_of(content: bytes) -> Sequence[DatasetRow]:
    """The rows of normalised content. Raises ValueError when the first one cannot be read, or another
    one that is not a recorded group."""
    first = content[: content.find(b"\n") + 1] or content
    if first and DatasetRow.model_validate_json(first).trajectory is not None:
        return UnparsedRows(content)
    return parse_rows(content)
