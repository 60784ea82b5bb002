"""Where the curves of a run are written: a tracker, through its own library.

Each export is a whole copy of the run's curves: TensorBoard's directory is written anew, W&B and MLflow
get a run of their own that names ours. So exporting again never doubles a point.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from producers.cli.errors import Failure

LONGEST_REASON = 300
"""Characters of a library's own message that are shown."""

Series = Mapping[str, Sequence[Mapping[str, Any]]]
"""A run's curves as the API gives them: key -> points with `step` and `value`."""


@dataclass(frozen=True, slots=True)
class ExportedRun:
    """What is exported: the run's id, its name, its config as nested sections."""

    run: str
    name: str
    config: Mapping[str, Any]


class Sink(Protocol):
    """One export in progress."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self, status: str) -> None:
        """The export is over; `status` is the run's."""
        ...

    @property
    def place(self) -> str:
        """Where to look at it."""
        ...


class NewPoints:
    """Points that were not written yet, by step: a validation may bring one of an earlier step."""

    def __init__(self) -> None:
        self._written: dict[str, set[int]] = {}

    def of(self, series: Series) -> Iterator[tuple[int, dict[str, float]]]:
        """Each step's new values, in order of the steps."""
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
    """A tracker's own library. Raises Failure where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Failure(
            "MISSING_LIBRARY",
            f"this export needs the library {name.partition('.')[0]} ({error}); install it with: "
            "pip install 'headrace[export]'",
        ) from error


@contextmanager
def translating_errors(tracker: str, hint: str) -> Iterator[None]:
    """Turn whatever a tracker's library raises inside into a Failure of one line that ends with `hint`,
    what the user can do. The libraries document no common base of their errors."""
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise Failure(
            "EXPORT_FAILED", f"the export to {tracker} failed: {said[0][:LONGEST_REASON]}; {hint}"
        ) from error


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested config as `section.key` and text; what was not set is left out."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten_config(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", str(value)


Opener = Callable[[ExportedRun], Sink]
