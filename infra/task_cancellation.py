"""Cancelling tasks reliably, even when a cancellation is lost.

A driver may lose a cancellation: it can coincide with a time-out, or come back from a server as "this
query was cancelled". It then looks like an unavailable database, and a loop that waits for the database
would never end. So every loop calls `go_on` to check whether its task was cancelled, and `end` repeats
the cancellation until the tasks have ended.

A task may also seem cancelled that is not. On Python 3.11 and 3.12, `asyncio.TaskGroup` cancels its own
task when a child fails, and takes that back only if the body was still running. When a child fails while
the group is left, `Task.cancelling()` stays at 1, and whatever reads it later (`go_on`,
`asyncio.timeout`, an enclosing group) takes the failure for a cancellation. Product code uses the
TaskGroup of this module; a test forbids the other.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Iterable
from types import TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)

AGAIN_S = 2.0
"""How often the cancellation is repeated. In between, a task may be cleaning up."""

END_S = 10.0
"""How long tasks have to end before the caller continues without them."""


def go_on() -> None:
    """Raise CancelledError if this task was cancelled, even if the first CancelledError was lost."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def forget_cancellations() -> int:
    """Take back the cancellations of this task that were not acted on. Returns how many there were."""
    task, found = asyncio.current_task(), 0
    while task is not None and task.cancelling():
        task.uncancel()
        found += 1
    return found


async def run_together(*jobs: Awaitable[None]) -> None:
    """Run these until one ends or raises, end the others, and raise its error."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(tasks)
    for task in done:
        task.result()


async def end(tasks: Iterable[asyncio.Future[Any]], *, within_s: float | None = None) -> bool:
    """Cancel tasks until they are done, for at most `within_s` seconds. Returns whether all of them
    are. Their exceptions are not raised here."""
    deadline = time.monotonic() + (END_S if within_s is None else within_s)
    pending = set(tasks)
    while pending and (left_s := deadline - time.monotonic()) > 0:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=min(AGAIN_S, left_s))
    for task in pending:
        logger.error("a task does not end after its cancellation, leaving it: %r", task)
    return not pending


class TaskGroup(asyncio.TaskGroup):
    """asyncio.TaskGroup that takes its own cancellations back on every version of Python. A
    cancellation from outside that meets an error of a child is raised again at the next await."""

    _cancelled_before = 0

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        self._cancelled_before = 0 if task is None else task.cancelling()
        return await super().__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        has_undone = self._has_cancelled_itself()
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup:
            self._restore_count(has_undone=has_undone)
            raise

    def _has_cancelled_itself(self) -> bool:
        return bool(getattr(self, "_parent_cancel_requested", False))

    def _restore_count(self, *, has_undone: bool) -> None:
        """Take back the cancellation that this version of asyncio leaves, and repeat a lost one."""
        task = asyncio.current_task()
        if task is None or sys.version_info >= (3, 13):
            return
        if self._has_cancelled_itself() and not has_undone:
            task.uncancel()
        if task.cancelling() > self._cancelled_before:
            task.uncancel()
            task.cancel()
