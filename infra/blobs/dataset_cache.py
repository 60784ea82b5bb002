"""Dataset rows, parsed once per content and process."""

from collections import OrderedDict
from collections.abc import Sequence

from infra.spine.ports.artifacts import Artifacts
from schemas.datasets import DatasetRow, parse_rows
from schemas.specs import DatasetRef

KEPT = 4
"""How many datasets stay parsed in memory."""


class DatasetCache:
    """`infra.ports.services.Datasets` over artifacts."""

    def __init__(self, artifacts: Artifacts) -> None:
        self._artifacts = artifacts
        self._parsed: OrderedDict[str, tuple[DatasetRow, ...]] = OrderedDict()

    async def rows(self, ref: DatasetRef) -> Sequence[DatasetRow]:
        key = ref.content.sha256
        if key not in self._parsed:
            self._parsed[key] = parse_rows(await self._artifacts.get_artifact(ref.content))
        self._parsed.move_to_end(key)
        while len(self._parsed) > KEPT:
            self._parsed.popitem(last=False)
        return self._parsed[key]
