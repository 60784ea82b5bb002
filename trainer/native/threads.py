"""Runs a C function on several threads at once."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache


def run_on_threads(run: Callable[[int], None], threads: int) -> None:
    """Call `run(thread)` on this thread (0), and on each helper that starts before this call has
    returned. `run` must not wait for any helper, because a helper may never start: the threads take
    shares of the work as they come. C functions release the interpreter's lock. No helper calls `run`
    after this call has returned, because the memory that it uses may then be gone."""
    others = _ask_helpers(run, threads)
    try:
        run(0)
    finally:
        for other in others:
            if not other.cancel():
                other.result()


def _ask_helpers(run: Callable[[int], None], threads: int) -> list[Future[None]]:
    """Hand the work to helpers. Where the system starts no more threads, there are fewer or none."""
    if threads < 2:
        return []
    helpers, others = _helpers(threads), list[Future[None]]()
    try:
        for thread in range(1, threads):
            others.append(helpers.submit(run, thread))
    except RuntimeError:  # its queue has the work, but there is no future to cancel it with
        helpers.shutdown(wait=False, cancel_futures=True)
        _helpers.cache_clear()
    return others


@cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="native")
