"""Tasks that are told to end, and do.

A cancellation can be lost: one that meets a time-out in a driver, or that comes back from a server as
"this query was cancelled", looks like a database that is away, and a loop that waits for that to pass
would never end. So every loop asks whether its task was told to end, and who ends tasks tells them
again until they have.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)

AGAIN_S = 2.0
"""A task that does not end is told again this often: meanwhile it may be leaving in order."""

END_S = 10.0
"""How long tasks have to end, before who waits for them goes on without."""


def go_on() -> None:
    """Raises CancelledError when this task was told to end, whatever became of the first one."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def end(tasks: Iterable[asyncio.Future[Any]], *, within_s: float | None = None) -> bool:
    """Cancel tasks until they are done, at most so long; whether they all are. What they raise is not
    raised here."""
    deadline = time.monotonic() + (END_S if within_s is None else within_s)
    pending = set(tasks)
    while pending and (left_s := deadline - time.monotonic()) > 0:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=min(AGAIN_S, left_s))
    for task in pending:
        logger.error("a task does not end, it is left alone: %r", task)
    return not pending
