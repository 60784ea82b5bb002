"""TensorBoard: one directory per run, which each export overwrites."""

from collections.abc import Mapping
from pathlib import Path

from producers.cli.exporters.sink import ExportedRun, import_library

OLD = "events.out.tfevents.*"


class TensorBoard:
    """Writes scalars to `directory`/NAME-ID."""

    def __init__(self, subject: ExportedRun, *, directory: Path) -> None:
        writer = import_library("tensorboard.summary").Writer
        self._path = directory / f"{subject.name}-{subject.run[:8]}"
        for old in self._path.glob(OLD):
            old.unlink()
        self._writer = writer(str(self._path))

    @property
    def place(self) -> str:
        return f"tensorboard --logdir {self._path.parent}"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step=step)
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.close()
