"""Writes the curves of a run to a tracker, through the tracker's own library.

Each export is a complete copy of the curves. TensorBoard's directory is overwritten. W&B and MLflow get
a new run, which names the Headrace run. So a second export never duplicates a point.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from producers.cli.errors import Failure

LONGEST_REASON = 300
"""The maximum number of characters of a library's own message to show."""

Series = Mapping[str, Sequence[Mapping[str, Any]]]
"""The curves of a run as the API returns them: key -> points with `step` and `value`."""


@dataclass(frozen=True, slots=True)
class ExportedRun:
    """The run to export: its id, its name, and its config as nested sections."""

    run: str
    name: str
    config: Mapping[str, Any]


class Sink(Protocol):
    """One export in progress."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self, status: str) -> None:
        """Finish the export; `status` is that of the run."""
        ...

    @property
    def place(self) -> str:
        """Where the export can be seen."""
        ...


class NewPoints:
    """Selects the points that were not written yet. It remembers them one by one, because a validation
    may add a point to an earlier step."""

    def __init__(self) -> None:
        self._written: dict[str, set[int]] = {}

    def of(self, series: Series) -> Iterator[tuple[int, dict[str, float]]]:
        """The new values of each step, in the order of the steps."""
        found: dict[int, dict[str, float]] = {}
        for key in sorted(series):
            known = self._written.setdefault(key, set())
            for point in series[key]:
                step = int(point["step"])
                if step not in known:
                    known.add(step)
                    found.setdefault(step, {})[key] = float(point["value"])
        yield from sorted(found.items())


def import_library(name: str) -> ModuleType:
    """Import a tracker's library. Raises Failure when it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Failure(
            "MISSING_LIBRARY",
            f"the library {name.partition('.')[0]} cannot be imported ({error}); install it with: "
            "pip install 'headrace[export]'",
        ) from error


@contextmanager
def translating_errors(tracker: str, hint: str) -> Iterator[None]:
    """Turn any error of a tracker's library into a Failure of one line that ends with `hint`, which says
    what the user can do. The libraries document no common base class for their errors."""
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Failure(
            "EXPORT_FAILED", f"the export to {tracker} failed: {lines[0][:LONGEST_REASON]}; {hint}"
        ) from error


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested config as pairs of `section.key` and text. Keys without a value are left out."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten_config(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", str(value)


Opener = Callable[[ExportedRun], Sink]
