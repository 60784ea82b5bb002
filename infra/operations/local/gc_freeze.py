"""Tune the garbage collector of a process that loads large libraries."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze() -> None:
    """Exclude everything that is loaded now from later collections, because it stays until the process
    ends. A collection stops the whole process, for tens of milliseconds, or hundreds with the numerical
    libraries. Freezing also prevents the collector from writing to memory pages that forks share."""
    gc.collect()
    gc.freeze()


@contextmanager
def collect_nothing() -> Iterator[None]:
    """Collect nothing while the block imports, and freeze what it imported. The collector would search
    what is already loaded again and again, which takes a sixth of the time of these imports."""
    gc.disable()
    try:
        yield
    finally:
        freeze()
        gc.enable()
