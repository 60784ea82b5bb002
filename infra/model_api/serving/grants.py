"""Where processes serve deployments, and the keys by which a control process asks them.

A control process makes a key for each process that serves, and uses it for an hour. The database holds
only its SHA-256, so a reader of the database cannot ask for answers. The process that serves looks a key
up once and remembers it until it expires.
"""

import asyncio
import hashlib
import secrets
import time
from dataclasses import dataclass

from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import TransientError
from schemas.ids import WorkerId

SQL = queries("infra/model_api/serving/serving.sql")

GRANT_S = 3600.0
PREFIX = "hrs-"
MOST_KEYS = 1024
MOST_LOOKING = 2
"""How many keys are looked up at the same time."""


@dataclass(frozen=True, slots=True)
class ServingAddress:
    """A process that serves."""

    worker: WorkerId
    url: str


class ServingDoors:
    """The addresses of the processes that serve, and keys for them."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def announce(self, worker: WorkerId, url: str) -> None:
        """Record where a process serves, and forget those that are gone for an hour."""
        await self._pool.execute(SQL["announce_server"], worker, url)
        await self._pool.execute(SQL["forget_old_servers"])

    async def find_addresses(self) -> list[ServingAddress]:
        """The processes with a live lease, the newest first."""
        rows = await self._pool.fetch(SQL["live_servers"])
        return [ServingAddress(WorkerId(row["worker"]), row["url"]) for row in rows]

    async def grant(self, worker: WorkerId) -> str:
        """Make a key for this process."""
        key = PREFIX + secrets.token_urlsafe(32)
        await self._pool.execute(SQL["grant_serving"], _digest(key), worker, GRANT_S)
        return key

    async def left_s(self, key: str, *, worker: WorkerId) -> float | None:
        """For how many seconds a key is valid at this process; None when it is not."""
        found: float | None = await self._pool.fetchval(SQL["find_grant"], _digest(key), worker)
        return found


class KnownKeys:
    """The keys that a process has looked up."""

    def __init__(self, doors: ServingDoors, worker: WorkerId) -> None:
        self._doors = doors
        self._worker = worker
        self._until: dict[bytes, float] = {}
        self._looking = asyncio.Semaphore(MOST_LOOKING)

    async def is_valid(self, key: str) -> bool:
        """Whether a control process made this key for us, and it has not expired. Raises TransientError
        while the database does not answer."""
        if not key.startswith(PREFIX):
            return False
        digest, now = _digest(key), time.monotonic()
        if self._until.get(digest, 0.0) > now:
            return True
        async with self._looking:  # a stranger's keys must not take all connections to the database
            try:
                left_s = await self._doors.left_s(key, worker=self._worker)
            except UNAVAILABLE_ERRORS as error:
                raise TransientError("the database does not answer now; try again") from error
        if left_s is None:
            return False
        if len(self._until) >= MOST_KEYS:
            self._until = {known: until for known, until in self._until.items() if until > now}
        self._until[digest] = now + left_s
        return True


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
