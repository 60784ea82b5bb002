"""Runs a C function on several threads at once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache


def run_on_threads(run: Callable[[int], None], threads: int) -> None:
    """Call `run(thread)` on this thread (0), and on each helper that starts before this call has
    returned. `run` must not wait for any helper, because a helper may never start: the threads take
    shares of the work as they come. C functions release the interpreter's lock."""
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
