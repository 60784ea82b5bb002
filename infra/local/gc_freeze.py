"""Tune the garbage collector of a process that has loaded its libraries."""

import gc


def freeze() -> None:
    """Exclude everything that is loaded now from later collections, because it stays until the process
    ends. A collection stops the whole process, for tens of milliseconds, or hundreds with the numerical
    libraries. Freezing also prevents the collector from writing to memory pages that forks share."""
    gc.collect()
    gc.freeze()
