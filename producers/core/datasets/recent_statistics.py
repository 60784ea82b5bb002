"""The statistics of datasets, computed once for each content, one at a time, in a thread."""

import asyncio
import io
import json
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

from infra.ports.services import Blobs
from producers.core.datasets.column_statistics import (
    MOST_BYTES,
    DatasetStatistics,
    compute_statistics,
)
from producers.core.datasets.mapping import Columns
from producers.core.datasets.readers import FORMATS, MAX_ROW_BYTES, PARQUET
from schemas.artifact_refs import ArtifactRef
from schemas.errors import NotFound
from schemas.events import DatasetRegistered

KEPT = 64
WAIT_S = 2.0
"""Seconds for which `of` waits. The work goes on after it."""


class RecentStatistics:
    """Computes statistics, and keeps those of the last contents that were asked for."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._turn = asyncio.Lock()
        self._tasks: OrderedDict[str, asyncio.Task[DatasetStatistics]] = OrderedDict()

    async def of(
        self, registered: DatasetRegistered, *, wait_s: float = WAIT_S
    ) -> DatasetStatistics | None:
        """The statistics of a dataset's file; None when they are not ready within `wait_s` seconds. A
        Parquet file is not read here, so its normalised rows are counted. Raises NotFound when the file
        is not stored, and StoreAway when the store cannot be used now."""
        kind, stored = _kind_of(registered.file_name), registered.original
        mapping: Columns = registered.mapping
        if kind == PARQUET:
            kind, stored, mapping = "jsonl", registered.dataset.content, {}
        key = json.dumps([stored.sha256, kind, sorted(mapping.items())])
        task = self._tasks.get(key)
        if task is None:
            if not self._has_room():
                return None
            work = self._compute(stored, kind, mapping)
            task = self._tasks[key] = asyncio.create_task(work)
            task.add_done_callback(lambda done: self._drop_failed(key, done))
        self._tasks.move_to_end(key)
        done, _ = await asyncio.wait({task}, timeout=wait_s)
        return task.result() if done else None

    def _has_room(self) -> bool:
        """Make room for one more. False when all that are kept are still being computed."""
        if len(self._tasks) < KEPT:
            return True
        oldest = next((key for key, task in self._tasks.items() if task.done()), None)
        if oldest is not None:
            del self._tasks[oldest]
        return oldest is not None

    def _drop_failed(self, key: str, done: asyncio.Task[DatasetStatistics]) -> None:
        """A failure is not kept, so the next request tries again."""
        if done.cancelled() or done.exception() is not None:
            self._tasks.pop(key, None)

    async def _compute(self, ref: ArtifactRef, kind: str, mapping: Columns) -> DatasetStatistics:
        async with self._turn:
            path = await self._blobs.file(ref.uri)
            if path is None:
                # With one row more than are counted, the limit is met before the end of the head.
                head = io.BytesIO(await read_head(self._blobs, ref, MOST_BYTES + 2 * MAX_ROW_BYTES))
                return await asyncio.to_thread(compute_statistics, head, kind, mapping=mapping)
            return await asyncio.to_thread(_compute_of_file, path, kind, mapping)


async def read_head(blobs: Blobs, ref: ArtifactRef, most: int) -> bytes:
    """The first `most` bytes of a file, or all of it. Raises NotFound when it is not stored."""
    path = await blobs.file(ref.uri)
    if path is not None:
        return await asyncio.to_thread(_read_file_head, path, most)
    head = bytearray()
    async for piece in blobs.chunks(ref.uri):
        head += piece
        if len(head) >= most:
            break
    return bytes(head[:most])


def _read_file_head(path: Path, most: int) -> bytes:
    with open_stored(path) as file:
        return file.read(most)


def _compute_of_file(path: Path, kind: str, mapping: Columns) -> DatasetStatistics:
    with open_stored(path) as file:
        return compute_statistics(file, kind, mapping=mapping)


def open_stored(path: Path) -> BinaryIO:
    """Open a file that is stored. Raises NotFound when it is not there any more."""
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise NotFound(f"no file at {path}; restore it from a backup") from error


def _kind_of(file_name: str) -> str:
    """The format of a file that was registered, by the ending of its name."""
    ending = file_name.rpartition(".")[2].lower()
    return PARQUET if ending == PARQUET else FORMATS.get(f".{ending}", "jsonl")
