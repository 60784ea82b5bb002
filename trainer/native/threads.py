"""C functions that several threads run together."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache


def together(run: Callable[[int], None], threads: int) -> None:
    """Call `run(thread)` on this thread (0), and on helpers that come before it has returned. They
    share the work as they come: `run` must not count on any of them. C functions let go of the
    interpreter."""
    others = [_helpers(threads).submit(run, thread) for thread in range(1, threads)]
    try:
        run(0)
    finally:
        for other in others:
            if not other.cancel():
                other.result()


@cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="native")
