"""Links that show one run to everyone who has them, until they expire or are revoked.

The key of a link is random, and the database holds only its SHA-256, so a reader of the database cannot
open one.
"""

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime

from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import Conflict

SQL = queries("infra/identity/access.sql")

DAY_S = 24 * 3600.0
DEFAULT_DAYS, MOST_DAYS = 7, 90
MOST_SHARES = 20
"""Links of one run that can be open at the same time."""

LONGEST_KEY = 100


@dataclass(frozen=True, slots=True)
class Share:
    """A link that is open: its id, who made it, and until when it shows the run."""

    id: str
    created_by: str
    created_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class NewShare:
    """A link that was just made. Its key is known only now."""

    id: str
    key: str
    expires_at: datetime


class Shares:
    """The links of runs (their ids)."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def create(self, run: str, *, days: int, by: str) -> NewShare:
        """Make a link that is open for so many days. Raises Conflict when the run has too many."""
        share, key = secrets.token_hex(6), secrets.token_urlsafe(32)
        async with self._pool.take_turns(f"links of {run}") as connection:
            expires_at = await connection.fetchval(
                SQL["insert_share"], share, _digest(key), run, by, days * DAY_S, MOST_SHARES
            )
        if expires_at is None:
            raise Conflict(
                f"the run has {MOST_SHARES} links that are open; revoke one before you make another"
            )
        return NewShare(share, key, expires_at)

    async def find_run(self, key: str) -> str | None:
        """The run (its id) that a key shows; None when it is unknown, expired or revoked."""
        if not key or len(key) > LONGEST_KEY:
            return None
        run: str | None = await self._pool.fetchval(SQL["share"], _digest(key))
        return run

    async def of_run(self, run: str) -> list[Share]:
        """The links of a run that are open, the newest first."""
        return [
            Share(row["share"], row["created_by"], row["created_at"], row["expires_at"])
            for row in await self._pool.fetch(SQL["shares_of_run"], run)
        ]

    async def revoke(self, run: str, share: str) -> bool:
        """Close a link of a run at once. Returns whether the run had one with this id."""
        return await self._pool.fetchval(SQL["delete_share"], run, share) is not None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
