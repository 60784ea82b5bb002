"""Runs functions that are not async in threads of their own.

The event loop continues meanwhile, and a function that never returns holds only its own thread. Such
threads are counted, because nothing can end them.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable

MOST_THREADS = 256


class TooManyThreads(RuntimeError):
    """Too many calls have not returned."""


_running = 0
_lock = threading.Lock()


async def call_in_thread(function: Callable[[], object]) -> object:
    """Call `function` in a new thread and return its result. If this is cancelled, the thread goes on
    and its result is dropped. Raises TooManyThreads when MOST_THREADS calls have not returned."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: object, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result: object = None
        error: BaseException | None = None
        try:
            result = context.run(function)
        except StopIteration as stopped:  # a future refuses it
            error = RuntimeError(f"StopIteration: {stopped}")
        except BaseException as raised:  # also SystemExit, which ends nothing but the call
            error = _as_exception(raised)
        finally:
            _count(-1)
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop has ended
            return

    _count(1)
    try:
        threading.Thread(target=run, name="tool", daemon=True).start()
    except BaseException:  # whatever it is, no thread runs
        _count(-1)
        raise
    return await future


def _as_exception(error: BaseException) -> BaseException:
    """Wrap what would end the event loop or look like our own cancellation."""
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    return wrapped.with_traceback(error.__traceback__)


def _count(change: int) -> None:
    global _running
    with _lock:
        if change > 0 and _running >= MOST_THREADS:
            raise TooManyThreads(
                f"{MOST_THREADS} calls of tools have not returned; the tools must return in time"
            )
        _running += change
