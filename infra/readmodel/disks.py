"""How much room the directories of this installation have, for `headrace status` and the dashboard."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict


class DiskJson(TypedDict):
    """The file system that holds `directories`, in bytes."""

    directories: list[str]
    free: int
    total: int


def disks(directories: Iterable[Path]) -> list[DiskJson]:
    """The file systems of these directories, each once. A directory that does not exist yet counts for
    its nearest parent. Reads file systems, so it may wait for a slow one."""
    found: dict[int, DiskJson] = {}
    for directory in directories:
        place = place_of(directory)
        if place is None:
            continue
        usage = shutil.disk_usage(place)
        empty = DiskJson(directories=[], free=usage.free, total=usage.total)
        found.setdefault(place.stat().st_dev, empty)["directories"].append(str(directory))
    return list(found.values())


def place_of(directory: Path) -> Path | None:
    """The directory, or the nearest of its parents that exists."""
    return next((place for place in (directory, *directory.parents) if place.exists()), None)
