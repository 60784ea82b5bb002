"""Where device workers answer chats with checkpoints, and the grants by which the API asks them.

A grant is usable once, by the worker that it is for, within GRANT_S seconds. The database holds only its
SHA-256, so a reader of the database cannot ask a worker.
"""

import hashlib
import secrets
from dataclasses import dataclass

from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.ids import WorkerId

SQL = queries("infra/readmodel/read_model.sql")

GRANT_S = 60.0
PREFIX = "hrg-"


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """The internal endpoint of a device worker."""

    worker: WorkerId
    url: str


class WorkerChats:
    """The endpoints of device workers, and grants for them."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def announce(self, worker: WorkerId, url: str) -> None:
        """Record where a worker answers, and forget workers that are gone for an hour."""
        await self._pool.execute(SQL["announce_worker"], worker, url)
        await self._pool.execute(SQL["forget_old_workers"])

    async def find_addresses(self) -> list[WorkerAddress]:
        """The endpoints of workers with a live lease, the newest first."""
        rows = await self._pool.fetch(SQL["live_workers"])
        return [WorkerAddress(WorkerId(row["worker"]), row["url"]) for row in rows]

    async def grant(self, worker: WorkerId) -> str:
        """Make a key for one chat with this worker."""
        key = PREFIX + secrets.token_urlsafe(32)
        await self._pool.execute(SQL["grant_chat"], _digest(key), worker, GRANT_S)
        return key

    async def redeem(self, key: str, *, worker: WorkerId) -> bool:
        """Use a key up. Returns whether it was one for this worker, not used before and not expired."""
        if not key.startswith(PREFIX):
            return False
        return bool(await self._pool.fetchval(SQL["redeem_chat"], _digest(key), worker))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
