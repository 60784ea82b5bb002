"""A database that does not answer now: one error for it, and which of asyncpg's errors mean it.

Who asked waits and asks again; the API says 503, never wrong data. A statement that can never work (an
argument that does not fit) is not among them: asked again for ever, it would hold up its neighbours.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import asyncpg

from infra.task_cancellation import go_on
from schemas.errors import TransientError

logger = logging.getLogger(__name__)

PAUSE_S = 0.5
"""About how long a loop waits before it asks a database that was away again."""


class Away(TransientError):
    """The database does not answer now, or cannot take anything; the same call may succeed later. What
    was asked may have been done all the same: the answer is what is missing."""


class DiskFull(Away):
    """It cannot take anything until somebody makes room."""

    PLAIN = "the database's disk is full; make room where its data lives"


ERRORS: tuple[type[Exception], ...] = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the server ended the connection between our calls
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.ReadOnlySQLTransactionError,
)

AWAY: tuple[type[Exception], ...] = (Away, *ERRORS)
"""What a caller of either the pools or a connection of its own may get."""


@contextmanager
def answering() -> Iterator[None]:
    """Turn asyncpg's errors into Away. Raises Away; CancelledError where the error is what became of a
    cancellation."""
    try:
        yield
    except ERRORS as error:
        if isinstance(error, ValueError):
            raise
        go_on()
        if isinstance(error, asyncpg.DiskFullError):
            raise DiskFull(f"{DiskFull.PLAIN} ({error})") from error
        raise Away(_said(error)) from error


def _said(error: Exception) -> str:
    if isinstance(error, asyncpg.TooManyConnectionsError):
        return f"the database has no connection left; raise its max_connections ({error})"
    if isinstance(error, TimeoutError):
        return "the database does not answer in time; try again"
    return f"the database does not answer now; try again ({error})"


async def through(loop: Callable[[], Awaitable[None]]) -> None:
    """Run a loop through the database's absences: it starts again, after a pause, each time it ends with
    Away. Returns when it returns; raises whatever else it raises. A task that was told to end starts
    nothing again."""
    while True:
        try:
            return await loop()
        except Away as error:
            go_on()
            logger.warning("%s", error)
        await asyncio.sleep(random.uniform(0.5, 1.5) * PAUSE_S)  # noqa: S311 - jitter
