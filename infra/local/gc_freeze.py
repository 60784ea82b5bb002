"""The garbage collector of a process that has loaded what it needs."""

import gc


def freeze() -> None:
    """What is loaded by now stays for as long as the process does, so the collector, which stops
    everything for as long as it looks, need not look at it again: that takes tens of milliseconds, with
    the numerical libraries hundreds. Nor does it write to pages that forks share."""
    gc.collect()
    gc.freeze()
