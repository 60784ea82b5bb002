"""Invitations into an organisation: links that make one person a member, once, within LASTS_S.

The database holds only the SHA-256 of the code of a link. An invitation ends when the owner who made it
is removed or has another role now.
"""

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from infra.identity.api_key_format import ID_DIGITS, digest
from infra.identity.api_keys import ApiKey, ApiKeyRequest, insert_api_key
from infra.identity.issuing import LIFETIME_S
from infra.identity.members import check_role, insert_member
from infra.identity.people import (
    Person,
    check_email,
    check_person_name,
    insert_person,
    keep_membership,
    person_of,
)
from infra.identity.quotas import Quotas
from infra.identity.recent_api_keys import RecentApiKeys
from infra.ports.actor import Actor, Role
from infra.spine.ports.clock import Clock
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound

SQL = queries("infra/identity/people.sql")

LASTS_S = 7 * 24 * 3600.0
MOST_OPEN = 1000
"""How many invitations of an organisation may be open."""

LONGEST_CODE = 100
ENDED = "this invitation was used or revoked, or is older than seven days; ask for another"


@dataclass(frozen=True, slots=True)
class Invitation:
    """An open invitation. With an e-mail address only the person with that address can use it."""

    id: str
    organisation: str
    role: Role
    email: str | None
    created_at: datetime
    created_by: str
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Welcome:
    """A person who has used an invitation, with a first API key in the organisation and its text."""

    person: Person
    api_key: ApiKey
    secret: str


class Invitations:
    """Makes, lists, revokes and accepts invitations."""

    def __init__(
        self, database: Database, recent: RecentApiKeys, clock: Clock, quotas: Quotas
    ) -> None:
        self._pool = database.durable
        self._recent, self._clock, self._quotas = recent, clock, quotas

    async def invite(
        self, organisation: str, role: str, email: str | None, inviter: Actor
    ) -> tuple[Invitation, str]:
        """Make an invitation into an organisation (an id). Returns it with the code of its link. Raises
        InvalidConfig, and Conflict when too many are open, or when the inviter is not an owner any
        more."""
        code = secrets.token_urlsafe(32)
        values = (
            "".join(secrets.choice(ID_DIGITS) for _ in range(10)),
            digest(code),
            organisation,
            check_role(role),
            None if email is None else check_email(email),
            inviter.name,
            inviter.person_id,
            LASTS_S,
            MOST_OPEN,
        )
        async with self._pool.acquire() as connection, connection.transaction():
            if inviter.person_id is not None:
                held = await keep_membership(connection, organisation, inviter.person_id)
                if held != "owner":
                    raise Conflict("you are not an owner of this organisation any more; ask one")
            row = await connection.fetchrow(SQL["insert_invitation"], *values)
        if row is None:
            raise Conflict(f"{MOST_OPEN} invitations are open; revoke those that nobody uses")
        return Invitation(**dict(row)), code

    async def find(self, code: str) -> tuple[Invitation, str] | None:
        """The open invitation of a code, and the title of its organisation."""
        row = await self._pool.fetchrow(SQL["invitation"], digest(code[:LONGEST_CODE]))
        if row is None:
            return None
        fields = dict(row)
        title = str(fields.pop("title"))
        return Invitation(**fields), title

    async def list_open(self, organisation: str) -> list[Invitation]:
        """The open invitations of an organisation, the newest first."""
        rows = await self._pool.fetch(SQL["invitations"], organisation)
        return [Invitation(**dict(row)) for row in rows]

    async def revoke(self, organisation: str, invitation: str) -> None:
        """End an open invitation. Raises NotFound."""
        if await self._pool.fetchval(SQL["delete_invitation"], organisation, invitation) is None:
            raise NotFound(f"there is no open invitation {invitation[:80]!r}")

    async def accept(self, code: str, name: str, email: str) -> Welcome:
        """Make a new person a member. Raises NotFound for an invitation that has ended, InvalidConfig
        for another address than the invitation's, Conflict when somebody has the address, and
        QuotaExceeded when the organisation may have no more members; the invitation then stays."""
        name, email = check_person_name(name), check_email(email)
        async with self._pool.acquire() as connection, connection.transaction():
            invitation = await self._use_up(connection, code, email)
            person = await insert_person(connection, name, email, created_by=invitation.created_by)
            welcome = await self._welcome(connection, person, invitation)
        self._recent.forget()
        return welcome

    async def accept_as(self, code: str, person_id: str) -> Welcome:
        """Make a person who has signed in a member. Raises as `accept` does, and Conflict for one who is
        a member already."""
        async with self._pool.acquire() as connection, connection.transaction():
            row = await connection.fetchrow(SQL["lock_person"], person_id)
            if row is None or row["removed_at"] is not None:
                raise NotFound(f"there is no person {person_id!r}")
            person = person_of(row)
            invitation = await self._use_up(connection, code, person.email)
            welcome = await self._welcome(connection, person, invitation)
        self._recent.forget()
        return welcome

    async def _use_up(self, connection: Any, code: str, email: str) -> Invitation:
        """Use an invitation up within a transaction. If that fails, the invitation stays open. The
        organisation is locked first, as removals do, which end the invitations of an owner."""
        sha256 = digest(code[:LONGEST_CODE])
        found = await connection.fetchrow(SQL["invitation"], sha256)
        if found is not None:
            await connection.execute(SQL["lock_organisation"], found["organisation"])
        row = found and await connection.fetchrow(SQL["take_invitation"], sha256)
        if row is None:
            raise NotFound(ENDED)
        invitation = Invitation(**dict(row))
        if invitation.email is not None and invitation.email.lower() != email.lower():
            message = "must be the address to which the invitation was made"
            raise InvalidConfig(f"email {message}", issues=(Issue("email", message),))
        return invitation

    async def _welcome(self, connection: Any, person: Person, invitation: Invitation) -> Welcome:
        """Make a person a member, with a first API key. The key has all scopes, of which the person's
        role allows its part."""
        await insert_member(
            connection,
            invitation.organisation,
            person.id,
            invitation.role,
            created_by=invitation.created_by,
            quotas=self._quotas,
        )
        request = ApiKeyRequest(
            name=f"sign-in-{invitation.id}",
            owner=person.id,
            scopes=frozenset({"admin"}),
            workspace=None,
            expires_at=self._clock.now() + timedelta(seconds=LIFETIME_S),
            created_by=f"{person.id}/invitation",
            organisation=invitation.organisation,
            person=person.id,
        )
        api_key, issued = await insert_api_key(connection, request)
        return Welcome(person, api_key, issued.text)
