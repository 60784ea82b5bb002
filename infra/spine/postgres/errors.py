"""The error for a database that does not answer now, and the errors of asyncpg that are turned into it.

The caller waits and tries again. The API answers 503, and never with wrong data. A statement that can
never succeed (an argument of the wrong type) raises another error, because endless retries of it would
block the work behind it.
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
"""About how long a loop waits before it tries an unavailable database again."""


class DatabaseUnavailable(TransientError):
    """The database does not answer now, or cannot write anything. The same call may succeed later. The
    statement may have been executed nevertheless, because only its answer is known to be missing."""


class DiskFull(DatabaseUnavailable):
    """The database cannot write anything until somebody frees disk space."""

    PLAIN = "the database's disk is full; free space on the volume that holds its data"


CLIENT_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the server ended the connection between our calls
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.ReadOnlySQLTransactionError,
)

UNAVAILABLE_ERRORS: tuple[type[Exception], ...] = (DatabaseUnavailable, *CLIENT_ERRORS)
"""The errors that a pool or a connection may raise."""


DATA_ERRORS = ("22", "23", "54")
"""Classes of SQLSTATE that say that the data is at fault: it cannot be held, breaks a constraint, or is
beyond a limit. Asked again, the answer is the same."""


def is_data_error(error: Exception) -> bool:
    """Whether the database, or its driver before it asks, refuses the data of a statement for good."""
    if isinstance(error, asyncpg.PostgresError):
        return str(error.sqlstate)[:2] in DATA_ERRORS
    return isinstance(error, ValueError)


@contextmanager
def translating_errors() -> Iterator[None]:
    """Turn asyncpg's errors inside the block into DatabaseUnavailable. Raises CancelledError instead
    when the driver's error was caused by a cancellation."""
    try:
        yield
    except CLIENT_ERRORS as error:
        if isinstance(error, ValueError):
            raise
        go_on()
        if isinstance(error, asyncpg.DiskFullError):
            raise DiskFull(f"{DiskFull.PLAIN} ({error})") from error
        raise DatabaseUnavailable(_message(error)) from error


def _message(error: Exception) -> str:
    if isinstance(error, asyncpg.TooManyConnectionsError):
        return f"the database has no connection left; raise its max_connections ({error})"
    if isinstance(error, TimeoutError):
        return "the database does not answer in time; try again"
    return f"the database does not answer now; try again ({error})"


async def reconnecting(loop: Callable[[], Awaitable[None]]) -> None:
    """Run a loop, and start it again after a pause each time it ends with DatabaseUnavailable. Returns
    when the loop returns, and raises everything else that it raises. A cancelled task starts nothing
    again."""
    while True:
        try:
            return await loop()
        except DatabaseUnavailable as error:
            go_on()
            logger.warning("%s", error)
        await asyncio.sleep(random.uniform(0.5, 1.5) * PAUSE_S)  # noqa: S311 - jitter
