"""Cancelling tasks reliably, even when a cancellation is lost.

A driver may lose a cancellation: it can coincide with a time-out, or come back from a server as "this
query was cancelled". It then looks like an unavailable database, and a loop that waits for the database
would never end. So every loop calls `go_on` to check whether its task was cancelled, and `end` repeats
the cancellation until the tasks have ended.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

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
