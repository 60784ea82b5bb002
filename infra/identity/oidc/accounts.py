"""People who sign in with the provider: who they are here, and which organisations they belong to.

A person is an account of the provider: its issuer and subject, which never mean somebody else later, as
an e-mail address can. Who signs in for the first time is the person with the same address only if the
provider has verified it.

At every sign-in the memberships that came from groups are made what the groups say now. Those that an
invitation or a command gave stay as they are.
"""

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from infra.identity import members
from infra.identity.api_keys import ApiKeyRequest, insert_api_key
from infra.identity.members import LastOwner, check_role
from infra.identity.oidc.id_token import SignInRefused
from infra.identity.oidc.provider import Identity
from infra.identity.people import (
    LONGEST_NAME,
    Person,
    check_email,
    check_person_name,
    insert_person,
    person_of,
)
from infra.identity.recent_api_keys import RecentApiKeys
from infra.identity.sessions import Bearer
from infra.ports.actor import Actor, Role
from infra.settings.oidc import ROLES, OidcSettings
from infra.spine.ports.clock import Clock
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import Conflict, InvalidConfig

logger = logging.getLogger(__name__)

SQL = queries("infra/identity/oidc/oidc.sql")
PEOPLE = queries("infra/identity/people.sql")

MADE_BY = "oidc"
"""The API key of a sign-in is made by PERSON/oidc."""


@dataclass(frozen=True, slots=True)
class Membership:
    """An organisation of a person, with the role there."""

    organisation: str
    name: str
    title: str
    role: Role
    from_groups: bool


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """A membership that groups changed, in words for the audit list."""

    organisation: str
    words: str


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A person who has signed in: the short-lived API key for the session, its organisation, and the
    others of the person."""

    person: Person
    bearer: Bearer
    organisation: str
    memberships: tuple[Membership, ...]
    changes: tuple[MembershipChange, ...] = field(default=())


class NoMembership(SignInRefused):
    """The person belongs to no organisation, so there is nothing to open. `person` and `changes` are for
    the audit list: the last membership may just have ended."""

    def __init__(
        self, message: str, *, person: str | None, changes: tuple[MembershipChange, ...] = ()
    ) -> None:
        super().__init__(message)
        self.person, self.changes = person, changes


class Accounts:
    """Finds and makes the people of accounts, and keeps their memberships."""

    def __init__(
        self, database: Database, settings: OidcSettings, recent: RecentApiKeys, clock: Clock
    ) -> None:
        self._pool, self._settings = database.durable, settings
        self._recent, self._clock = recent, clock

    async def sign_in(self, identity: Identity) -> SignedIn:
        """Sign a person in. Raises SignInRefused, NoMembership, and Conflict when two first sign-ins of
        a person meet."""
        try:
            async with self._pool.acquire() as connection, connection.transaction():
                wanted = await self._roles_of(connection, identity.groups)
                person = await self._person_of(connection, identity, may_be_new=bool(wanted))
                if person is None:
                    raise NoMembership(_ask_for(identity, self._settings), person=None)
                changes = await self._follow_groups(connection, person.id, wanted)
                memberships = await _memberships(connection, person.id)
                bearer = None
                if memberships:
                    await connection.execute(SQL["revoke_expired"], person.id, MADE_BY)
                    bearer = await self._make_key(
                        connection, person.id, memberships[0].organisation, self._settings.hours
                    )
        finally:
            self._recent.forget()
        if bearer is None:
            raise NoMembership(
                _ask_for(identity, self._settings), person=person.id, changes=changes
            )
        return SignedIn(person, bearer, memberships[0].organisation, memberships, changes)

    async def memberships_of(self, person: str) -> tuple[Membership, ...]:
        """The organisations of a person, by name."""
        async with self._pool.acquire() as connection:
            return await _memberships(connection, person)

    async def switch(self, actor: Actor, organisation: str) -> Bearer:
        """The API key of a sign-in in another organisation (an id) of the person, in place of the one of
        the actor. It ends when that one would have. Raises SignInRefused."""
        async with self._pool.acquire() as connection, connection.transaction():
            until = await connection.fetchval(
                SQL["sign_in_key"], actor.api_key, actor.person_id, MADE_BY
            )
            if until is None or actor.person_id is None:
                raise SignInRefused(
                    "you did not sign in with the provider; sign out, and sign in with an API key "
                    "of the other organisation"
                )
            mine = [one.organisation for one in await _memberships(connection, actor.person_id)]
            if organisation not in mine:
                raise SignInRefused("you are not a member of this organisation; choose another one")
            hours = (until - self._clock.now()).total_seconds() / 3600
            bearer = await self._make_key(connection, actor.person_id, organisation, hours)
            await connection.execute(SQL["revoke_sign_in"], actor.api_key, MADE_BY)
        self._recent.forget()
        return bearer

    async def end(self, api_key: str) -> None:
        """Revoke the API key of a sign-in, which nobody can use any more after signing out. Another key
        stays as it is."""
        if await self._pool.fetchval(SQL["revoke_sign_in"], api_key, MADE_BY) is not None:
            self._recent.forget()

    async def _roles_of(self, connection: Any, groups: frozenset[str]) -> Mapping[str, Role]:
        """The role that the groups give in each organisation (an id): of several the one with the most
        rights."""
        roles: dict[str, str] = {}
        for one in self._settings.groups:
            held = roles.get(one.organisation, one.role)
            if one.group in groups:
                roles[one.organisation] = min(one.role, held, key=ROLES.index)
        rows = await connection.fetch(SQL["organisations_named"], list(roles))
        for name in set(roles) - {row["name"] for row in rows}:
            logger.warning(
                "HEADRACE_OIDC_GROUPS names the organisation %s, which is not there", name
            )
        return {row["id"]: check_role(roles[row["name"]]) for row in rows}

    async def _person_of(
        self, connection: Any, identity: Identity, *, may_be_new: bool
    ) -> Person | None:
        """The person of an account, locked until the transaction ends; None for somebody new who belongs
        to no organisation, of whom nothing is stored."""
        account = (identity.issuer, identity.subject)
        known = await connection.fetchval(SQL["person_of_account"], *account)
        if known is not None:
            row = await connection.fetchrow(PEOPLE["lock_person"], known)
            if row["removed_at"] is None:
                await connection.execute(SQL["put_account"], *account, known)
                return person_of(row)
        row = None
        if identity.email is not None:
            email = _address_of(identity.email)
            row = await connection.fetchrow(PEOPLE["person_with_email"], email)
        if row is not None:
            return await self._link(connection, identity, row["id"])
        if known is not None:
            raise SignInRefused(
                "you were removed from this installation; ask an owner of your organisation for an "
                "invitation, and sign in again after you have used it"
            )
        if not may_be_new:
            return None
        person = await self._make_person(connection, identity)
        await self._put_account(connection, identity, person.id)
        return person

    async def _link(self, connection: Any, identity: Identity, person: str) -> Person:
        """Make an account that of the person with the same e-mail address, which the provider must have
        verified: else anybody could take a person over by claiming the address. The API keys, logins and
        invitations that the person made before the first account end."""
        if identity.has_verified_email is not True:
            raise SignInRefused(
                f"there is a person with the address {identity.email}, and the provider does not say "
                "that the address is verified (email_verified); verify it there, or sign in with an API "
                "key"
            )
        row = await connection.fetchrow(PEOPLE["lock_person"], person)
        if row["removed_at"] is not None:
            raise Conflict("the person was removed at this moment; sign in again")
        other = await connection.fetchval(SQL["subject_of_person"], person, identity.issuer)
        if other not in (None, identity.subject):
            raise SignInRefused(
                f"the person with the address {identity.email} signs in with another account of this "
                "provider; ask the operator, who can remove that person (`headrace person remove`)"
            )
        await self._put_account(connection, identity, person)
        if other is None:
            # Whoever used an invitation only claimed the address. Their API keys would reach the
            # personal secrets and see the organisations of the person who now comes.
            await connection.execute(SQL["end_access_of_before"], person)
        return person_of(row)

    async def _put_account(self, connection: Any, identity: Identity, person: str) -> None:
        account = (identity.issuer, identity.subject)
        if await connection.fetchval(SQL["put_account"], *account, person) is None:
            raise Conflict("you signed in twice at the same moment; sign in again")

    async def _make_person(self, connection: Any, identity: Identity) -> Person:
        if identity.email is None:
            raise SignInRefused(
                "the provider does not say your e-mail address; ask the operator to let it send the "
                "claim email"
            )
        email = _address_of(identity.email)
        name = (identity.name or email.partition("@")[0])[:LONGEST_NAME]
        try:
            name = check_person_name(name)
        except InvalidConfig:
            name = "Person"
        return await insert_person(connection, name, email, created_by=MADE_BY)

    async def _follow_groups(
        self, connection: Any, person: str, wanted: Mapping[str, Role]
    ) -> tuple[MembershipChange, ...]:
        """Make the memberships that came from groups what the groups give now. The last owner of an
        organisation stays its owner."""
        held = {one.organisation: one for one in await _memberships(connection, person)}
        for organisation in sorted({*wanted, *held}):
            await connection.execute(PEOPLE["lock_organisation"], organisation)
        held = {one.organisation: one for one in await _memberships(connection, person)}
        changes: list[MembershipChange] = []
        for organisation in sorted({*wanted, *held}):
            before, role = held.get(organisation), wanted.get(organisation)
            words = await _follow(connection, person, organisation, before=before, role=role)
            if words:
                changes.append(MembershipChange(organisation, words))
        return tuple(changes)

    async def _make_key(
        self, connection: Any, person: str, organisation: str, hours: float
    ) -> Bearer:
        """A short-lived API key, whose text nobody learns. It has all scopes, of which the role allows
        its part."""
        request = ApiKeyRequest(
            name=f"sign-in-{secrets.token_hex(6)}",
            owner=person,
            scopes=frozenset({"admin"}),
            workspace=None,
            expires_at=self._clock.now() + timedelta(hours=hours),
            created_by=f"{person}/{MADE_BY}",
            organisation=organisation,
            person=person,
        )
        api_key, _ = await insert_api_key(connection, request)
        return Bearer(api_key.id, api_key.sha256)


async def _follow(
    connection: Any, person: str, organisation: str, *, before: Membership | None, role: Role | None
) -> str:
    """Make one membership what the groups say. Returns what changed, in words; empty for nothing."""
    if before is None:
        await connection.execute(
            SQL["insert_member_from_groups"], organisation, person, role, MADE_BY
        )
        return f"groups made {person} {role}"
    if not before.from_groups or before.role == role:
        return ""
    try:
        if role is None:
            await members.remove_member(connection, organisation, person)
            return f"groups removed {person}"
        await members.change_role(connection, organisation, person, role)
    except LastOwner:
        logger.warning(
            "%s has lost the group of owners, and stays an owner: organisation %s has no other",
            person,
            organisation,
        )
        return f"{person} stays the last owner, against the groups"
    return f"groups made {person} {role}, before {before.role}"


def _address_of(text: str) -> str:
    """The address that the provider sends. Raises SignInRefused."""
    try:
        return check_email(text)
    except InvalidConfig as error:
        raise SignInRefused(f"the provider sends an address that cannot be one: {error}") from error


async def _memberships(connection: Any, person: str) -> tuple[Membership, ...]:
    rows = await connection.fetch(SQL["memberships"], person)
    return tuple(Membership(**dict(row)) for row in rows)


def _ask_for(identity: Identity, settings: OidcSettings) -> str:
    """The text for somebody who belongs to no organisation."""
    return (
        f"you are known to {settings.host} as {identity.email or identity.subject}, and belong to no "
        "organisation here; ask the operator to add you to a group that gives a role "
        "(HEADRACE_OIDC_GROUPS), or ask an owner for an invitation"
    )
