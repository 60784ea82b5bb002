"""Device logins in the database: programs that wait for an API key until a person approves their code.

A login has two codes. The program keeps the device code, of 256 random bits, and asks with it. A person
types the user code, of 43 random bits, into a page of the dashboard. The database holds only the SHA-256
of both. The API key is made when the program asks after the approval, in the transaction that deletes
the login, so that a login makes at most one key.
"""

import re
import secrets
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from infra.identity.api_key_format import IssuedApiKey, digest
from infra.identity.api_keys import ApiKey, ApiKeyRequest, NameInUse, insert_api_key
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries

SQL = queries("infra/identity/people.sql")

USER_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
"""The letters of user codes: those of RFC 8628, section 6.1. None looks like a digit that is a letter of
a code, and without vowels they spell no words."""

USER_LENGTH = 10
LONGEST_CODE = 100
MOST_WAITING = 10_000
"""How many logins may wait at the same time. A further one takes the place of the oldest."""


@dataclass(frozen=True, slots=True)
class Codes:
    """The codes of a new login."""

    device: str
    user: str


@dataclass(frozen=True, slots=True)
class WaitingLogin:
    """A login that waits for a person, as that person sees it."""

    device_name: str
    address: str
    created_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Approval:
    """The API key that an approved login becomes. `approved_by` is the id of the API key that
    approves, whose scopes it will have."""

    person: str
    organisation: str
    workspace: str | None
    approved_by: str
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a login is: not decided (None), approved or denied; and how long its program has to
    wait between questions."""

    is_approved: bool | None
    interval_s: int
    is_too_soon: bool


class DeviceLoginStore:
    """Stores device logins."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def begin(
        self, device_name: str, address: str, *, interval_s: int, lasts_s: float
    ) -> Codes:
        """Store a new login."""
        codes = Codes(secrets.token_urlsafe(32), new_user_code())
        await self._pool.execute(
            SQL["insert_device_login"],
            digest(codes.device),
            digest(_letters(codes.user)),
            device_name,
            address,
            interval_s,
            lasts_s,
            MOST_WAITING,
        )
        return codes

    async def find(self, user_code: str) -> WaitingLogin | None:
        """The login that waits for its approval under a user code."""
        row = await self._pool.fetchrow(
            SQL["device_login_of_user_code"], digest(_letters(user_code))
        )
        return None if row is None else WaitingLogin(*row)

    async def decide(self, user_code: str, approval: Approval | None) -> str | None:
        """Approve a login that waits, or deny it (None). Returns the name of the device; None when no
        login waits under the code."""
        parts: tuple[object, ...] = (None,) * 5
        if approval is not None:
            parts = (
                *(approval.person, approval.organisation, approval.workspace),
                *(approval.approved_by, approval.expires_at),
            )
        row = await self._pool.fetchrow(
            SQL["decide_device_login"], digest(_letters(user_code)), approval is not None, *parts
        )
        return None if row is None else str(row["device_name"])

    async def poll(self, device_code: str, *, slower_s: int) -> Progress | None:
        """Note that a program asks. A question that comes too soon makes its interval `slower_s`
        longer. None when the code is unknown, used or expired."""
        if len(device_code) > LONGEST_CODE:
            return None
        row = await self._pool.fetchrow(SQL["poll_device_login"], digest(device_code), slower_s)
        if row is None:
            return None
        return Progress(row["approved"], row["interval_s"], row["is_too_soon"])

    async def forget(self, device_code: str) -> None:
        """Delete a login."""
        await self._pool.execute(SQL["delete_device_login"], digest(device_code))

    async def redeem(self, device_code: str) -> tuple[ApiKey, IssuedApiKey] | None:
        """Use an approved login up and make its API key. None when it was used, or when its approval
        does not stand any more: the key that approved is not valid, or its person is not a member.
        Raises Conflict when there are too many keys."""
        async with self._pool.acquire() as connection, connection.transaction():
            row = await connection.fetchrow(SQL["take_device_login"], digest(device_code))
            if row is None:
                return None
            stands = await connection.fetchval(
                SQL["approval_stands"], row["approved_by"], row["person"], row["organisation"]
            )
            return await self._make_key(connection, row) if stands else None

    async def _make_key(self, connection: Any, row: Any) -> tuple[ApiKey, IssuedApiKey]:
        request = ApiKeyRequest(
            name=_key_name(row["device_name"]),
            owner=row["person"],
            scopes=frozenset(row["scopes"]),
            workspace=row["workspace"],
            expires_at=row["key_expires_at"],
            created_by=f"{row['person']}/{row['approved_by']}",
            organisation=row["organisation"],
            person=row["person"],
        )
        try:
            return await insert_api_key(connection, request)
        except NameInUse:
            other = replace(request, name=f"{request.name}-{secrets.token_hex(4)}")
            return await insert_api_key(connection, other)


def new_user_code() -> str:
    """A new user code, in two groups of letters."""
    letters = "".join(secrets.choice(USER_LETTERS) for _ in range(USER_LENGTH))
    return f"{letters[: USER_LENGTH // 2]}-{letters[USER_LENGTH // 2 :]}"


def _letters(user_code: str) -> str:
    """A user code as the database knows it. People may leave out the hyphen and write small letters."""
    return re.sub(r"[\s-]", "", user_code[:LONGEST_CODE]).upper()


def _key_name(device_name: str) -> str:
    """The name of an API key for a device."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", device_name)[:50].strip("-._")
    return slug or "device"
