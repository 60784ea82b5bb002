"""Sessions of browsers, and codes that open one session each.

A session belongs to the API key that signed in and ends with it. The cookie of a session and a code
are random. The database holds only their SHA-256, so a reader of the database cannot sign in.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from infra.identity.issuing import BeyondRights
from infra.ports.actor import ROOT, ROOT_OWNER, Actor
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries

SQL = queries("infra/identity/access.sql")

SESSION_S = 12 * 3600.0
CODE_S = 600.0
LONGEST = 100
"""No cookie of a session and no code is longer."""

MOST_SHOWN = 1000
"""A list of sessions has at most this many."""


@dataclass(frozen=True, slots=True)
class Bearer:
    """The API key that a session stands for: its id, and the SHA-256 of its text."""

    api_key: str
    sha256: bytes


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """An open session as lists show it. `id` is a part of the hash of its cookie, and opens nothing."""

    id: str
    api_key: str
    api_key_name: str | None
    owner: str
    created_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Holder:
    """Whose sessions are meant: those of all API keys of an owner (None: of every owner), or of one
    key alone."""

    owner: str | None
    api_key: str | None = None


def holder_of(actor: Actor, *, owner: str | None = None, is_everyone: bool = False) -> Holder:
    """The sessions that an actor may see and end: those of its owner, and for an administrator
    those of another one or of all. An API key that is bound to a workspace has its own alone.
    Raises BeyondRights."""
    is_own = not is_everyone and owner in (None, actor.owner)
    if not is_own and not (actor.may("admin") and not actor.is_confined):
        raise BeyondRights(
            "sessions of others need an API key of all workspaces with the scope admin; leave the "
            "owner out to get your own"
        )
    if actor.workspace is not None:
        return Holder(actor.owner, actor.api_key)
    return Holder(None if is_everyone else owner or actor.owner)


def session_id(cookie: str) -> str:
    """The id of the session with this cookie."""
    return _id_of(_digest(cookie))


class Sessions:
    """Opens, finds, lists and ends sessions."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def issue_code(self, bearer: Bearer) -> str:
        """Make a code that opens one session for this API key within CODE_S seconds."""
        code = secrets.token_urlsafe(32)
        await self._pool.execute(
            SQL["insert_code"], _digest(code), bearer.api_key, bearer.sha256, CODE_S
        )
        return code

    async def find_code(self, code: str) -> Bearer | None:
        """The API key of a code that can still be used; it stays so."""
        if len(code) > LONGEST:
            return None
        return _bearer(await self._pool.fetchrow(SQL["code"], _digest(code)))

    async def redeem_code(self, code: str) -> Bearer | None:
        """Use a code up. Returns its API key; None when the code is unknown, used or expired."""
        if len(code) > LONGEST:
            return None
        return _bearer(await self._pool.fetchrow(SQL["redeem_code"], _digest(code)))

    async def open(self, bearer: Bearer) -> str:
        """Open a session of SESSION_S seconds. Returns the value of its cookie."""
        cookie = secrets.token_urlsafe(32)
        await self._pool.execute(
            SQL["insert_session"], _digest(cookie), bearer.api_key, bearer.sha256, SESSION_S
        )
        return cookie

    async def find_bearer(self, cookie: str) -> Bearer | None:
        """The API key of the session with this cookie; None when the session is unknown or expired."""
        if not cookie or len(cookie) > LONGEST:
            return None
        return _bearer(await self._pool.fetchrow(SQL["session"], _digest(cookie)))

    async def end(self, cookie: str) -> None:
        """End a session. An unknown one is ended already."""
        if cookie and len(cookie) <= LONGEST:
            await self._pool.execute(SQL["delete_session"], _digest(cookie))

    async def list_open(self, holder: Holder) -> list[BrowserSession]:
        """The open sessions of a holder, the newest first, at most MOST_SHOWN."""
        rows = await self._pool.fetch(
            SQL["sessions"], holder.owner, holder.api_key, ROOT, ROOT_OWNER, MOST_SHOWN
        )
        return [
            BrowserSession(
                id=_id_of(row["sha256"]),
                api_key=row["api_key"],
                api_key_name=row["api_key_name"],
                owner=row["owner"],
                created_at=row["created_at"],
                expires_at=row["expires_at"],
            )
            for row in rows
        ]

    async def end_all(self, holder: Holder) -> int:
        """End all sessions of a holder and make its unused codes invalid. Returns how many sessions were
        open."""
        count = await self._pool.fetchval(
            SQL["delete_sessions"], holder.owner, holder.api_key, ROOT, ROOT_OWNER
        )
        return int(count)


def form_key(bearer: Bearer) -> str:
    """The form key, which every form holds that is made for a session of this API key. A page of
    another origin cannot know it, and it stays the same when the API key signs in again."""
    return hmac.new(bearer.sha256, b"form", hashlib.sha256).hexdigest()[:40]


def is_form_key(key: str, bearer: Bearer) -> bool:
    """Whether a form key is the one of this API key. Compares in constant time."""
    return hmac.compare_digest(key.encode(), form_key(bearer).encode())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _id_of(sha256: bytes) -> str:
    return sha256.hex()[:12]


def _bearer(row: Any) -> Bearer | None:
    return None if row is None else Bearer(row["api_key"], row["api_key_sha256"])
