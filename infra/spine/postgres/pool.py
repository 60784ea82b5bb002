"""Connections to Postgres in two pools: commits of `durable` wait for the disk, those of `lazy` do not.

`lazy` is for claims, leases, watermarks, projections and wake-ups. If a power cut loses the last of
them, that only costs time. Appends always use `durable`, because otherwise the bus could publish an
event that a crash then removes.

Every connection works as the role `headrace_worker`, which cannot drop a table or rewrite an event, or
as the role of a service, which may do less (`infra/operations/maintenance/service_roles.py`). Only
migrations and repairs work as another role that the URL names. A connection that is lost, or that does
not answer in time, is dropped, and its call raises DatabaseUnavailable. The next call gets a new
connection.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg

from infra.settings.settings import DatabaseLimits
from infra.spine.ports.visible_workspaces import VISIBLE
from infra.spine.postgres.errors import CLIENT_ERRORS, translating_errors
from infra.spine.postgres.history import History
from infra.spine.postgres.row_security import ConfinedConnection
from schemas.errors import InvalidConfig, TransientError

ROLE = "headrace_worker"
"""Made by the first migration; see docs/decisions/0004-run-processes-under-one-role.md."""

SERVICES = (
    *("api", "relay", "sync", "run", "checkpoint", "evaluate"),
    *("rollout", "grade", "learn", "verify", "publish", "deploy", "regrade", "compare"),
)
"""The services of a cluster, each of which can have a role of its own."""

NOT_OPENED = (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError)
"""The errors of a server that does not know the login or the database."""

CONNECT_S = 10.0
"""How long a new connection may take."""

GRACE_S = 2.0
"""The client waits this much longer than the server lets a statement run."""

Row = Any
"""asyncpg ships no types; its records and connections are Any at this one border."""


class Pool:
    """Connections of one kind. Every method raises DatabaseUnavailable when the database does not
    answer."""

    def __init__(self, pool: Any, size: int, history: History | None = None) -> None:
        """`size` is the number of connections. Callers get one in the order in which they ask, which the
        driver's pool alone does not keep."""
        self._pool = pool
        self._turns = asyncio.Semaphore(size)
        self.history = history or History()

    async def fetch(self, sql: str, *arguments: object) -> Any:
        """Run a statement and return all rows."""
        return await self._call("fetch", sql, arguments)

    async def fetchrow(self, sql: str, *arguments: object) -> Row:
        """Run a statement and return the first row, or None."""
        return await self._call("fetchrow", sql, arguments)

    async def fetchval(self, sql: str, *arguments: object) -> Any:
        """Run a statement and return the first column of the first row, or None."""
        return await self._call("fetchval", sql, arguments)

    async def execute(self, sql: str, *arguments: object) -> str:
        """Run a statement and return the command's tag (`UPDATE 1`)."""
        tag: str = await self._call("execute", sql, arguments)
        return tag

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Any]:
        """Reserve a connection for the caller inside the block, for a transaction. It shows only rows
        that the task may see. Errors inside the block also become DatabaseUnavailable."""
        with translating_errors():
            connection = await self._take()
            try:
                self.history.check()
                await connection.show_rows_of(VISIBLE.get())
                yield connection
            except TimeoutError:
                # The network dropped the connection silently, so the idle ones are dead too.
                connection.terminate()
                await self._pool.expire_connections()
                raise
            except asyncpg.InternalClientError:
                connection.terminate()  # the driver may still take it for open
                raise
            finally:
                try:
                    await self._pool.release(connection, timeout=CONNECT_S)
                finally:
                    self._turns.release()

    async def _take(self) -> Any:
        """A connection, after those who asked before. Raises TimeoutError."""
        async with asyncio.timeout(CONNECT_S if self._turns.locked() else None):
            await self._turns.acquire()
        try:
            return await self._pool.acquire(timeout=CONNECT_S)
        except BaseException:
            self._turns.release()
            raise

    @asynccontextmanager
    async def take_turns(self, what: str) -> AsyncIterator[Any]:
        """Reserve a connection with a transaction for the caller inside the block. Others for the same
        `what` wait until it ends, so that what they count stays true until they have added to it."""
        async with self.acquire() as connection, connection.transaction():
            await connection.execute("select pg_advisory_xact_lock(hashtextextended($1, 49))", what)
            yield connection

    def terminate(self) -> None:
        """Close all connections at once."""
        self._pool.terminate()

    async def _call(self, method: str, sql: str, arguments: tuple[object, ...]) -> Any:
        async with self.acquire() as connection:
            return await getattr(connection, method)(sql, *arguments)


@dataclass(frozen=True, slots=True)
class Database:
    """The two pools of one database, and its history."""

    url: str
    durable: Pool
    lazy: Pool

    @property
    def history(self) -> History:
        return self.durable.history


@asynccontextmanager
async def connect(
    url: str, *, size: int | None = None, limits: DatabaseLimits | None = None
) -> AsyncIterator[Database]:
    """Open both pools, of at most `size` connections each. Raises TransientError when the server does
    not answer, InvalidConfig when it has no schema of ours."""
    limits = limits or DatabaseLimits()
    size = size or limits.pool
    history = History()
    durable = await _pool(url, size, limits, history, synchronous_commit="on")
    lazy = await _pool(url, size, limits, history, synchronous_commit="off")
    try:
        yield Database(
            url=url, durable=Pool(durable, size, history), lazy=Pool(lazy, size, history)
        )
    finally:
        durable.terminate()
        lazy.terminate()


@asynccontextmanager
async def administering(url: str) -> AsyncIterator[Any]:
    """Open a connection as the role that the URL names, for migrations, repairs and copies. It may
    change what the processes' role may not, and its statements have no time limit. Raises
    InvalidConfig when the URL opens no database, and TransientError when no server answers."""
    try:
        connection = await asyncpg.connect(
            url, timeout=CONNECT_S, server_settings={"application_name": "headrace admin"}
        )
    except NOT_OPENED as error:
        raise InvalidConfig(f"HEADRACE_DATABASE_URL opens no database: {error}") from error
    except CLIENT_ERRORS as error:
        raise TransientError(f"no Postgres answers at HEADRACE_DATABASE_URL: {error}") from error
    try:
        yield connection
    finally:
        connection.terminate()


async def open_session(url: str, name: str) -> Any:
    """Open a connection outside of the pools that stays open, to listen or to hold a lock. It works as
    the processes' role, and the server lists it under `name`. Raises DatabaseUnavailable."""
    with translating_errors():
        return await asyncpg.connect(
            url,
            timeout=CONNECT_S,
            server_settings={"application_name": name, "role": role_of(url)},
        )


def service_role(database: str, service: str) -> str:
    """The name of the role with which a service logs in to a database."""
    return f"{database}_{service}"


def role_of(url: str) -> str:
    """The role that connections to a database work as: the one of a service if the URL names it, else
    that of all processes."""
    parts = urlsplit(url)
    user, database = unquote(parts.username or ""), unquote(parts.path.lstrip("/"))
    return user if user in {service_role(database, service) for service in SERVICES} else ROLE


async def _pool(
    url: str, size: int, limits: DatabaseLimits, history: History, *, synchronous_commit: str
) -> Any:
    try:
        return await asyncpg.create_pool(
            url,
            min_size=1,
            max_size=size,
            timeout=CONNECT_S,
            command_timeout=limits.statement_s + GRACE_S,
            reset=_keep_session,
            init=history.meet,
            connection_class=ConfinedConnection,
            server_settings={
                "application_name": "headrace",
                "role": role_of(url),
                "synchronous_commit": synchronous_commit,
                "statement_timeout": f"{limits.statement_s:.0f}s",
                "idle_in_transaction_session_timeout": f"{limits.idle_in_transaction_s:.0f}s",
                "jit": "off",
            },
        )
    except asyncpg.InvalidParameterValueError as error:
        raise InvalidConfig(
            f"the database at HEADRACE_DATABASE_URL has no role {ROLE}: `headrace up` or "
            "`python -m infra.spine.postgres.migrate` prepares it"
        ) from error
    except NOT_OPENED as error:
        raise InvalidConfig(f"HEADRACE_DATABASE_URL opens no database: {error}") from error
    except asyncpg.InsufficientPrivilegeError as error:
        raise InvalidConfig(
            f"the user of HEADRACE_DATABASE_URL may not act as {ROLE}: grant {ROLE} to it"
        ) from error
    except CLIENT_ERRORS as error:
        raise TransientError(f"no Postgres answers at HEADRACE_DATABASE_URL: {error}") from error


async def _keep_session(_: Any) -> None:
    """Reset nothing when a connection is returned to the pool. No statement here changes a session's
    state but the one that says whose rows it shows, which is sent again when that changes. So the round
    trip of a reset is not needed."""
