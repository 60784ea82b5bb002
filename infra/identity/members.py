"""Members: the people of an organisation, each with a role.

The last owner of an organisation cannot leave and keeps the role. With a member go the API keys that
the person has in the organisation, and the invitations and approvals that the person gave; runs that
the person submitted go on.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, get_args

from infra.identity.people import Person, person_of
from infra.identity.quotas import Quotas
from infra.ports.actor import Role
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound

SQL = queries("infra/identity/people.sql")


class LastOwner(Conflict):
    """The last owner of an organisation stays."""


@dataclass(frozen=True, slots=True)
class OrganisationMember:
    """A person with the role in an organisation. A membership `from_groups` was given by groups of the
    sign-in provider, and follows them at each sign-in."""

    person: Person
    role: Role
    joined_at: datetime
    from_groups: bool = False


class Members:
    """Lists and changes the members of organisations. `changed` is called after each change, so that
    this process reads API keys and roles again."""

    def __init__(self, database: Database, changed: Callable[[], None], quotas: Quotas) -> None:
        self._pool = database.durable
        self._changed = changed
        self._quotas = quotas

    async def page(
        self, organisation: str, *, limit: int, offset: int
    ) -> tuple[list[OrganisationMember], int]:
        """A page of the members of an organisation (an id), in the order in which they came, and how
        many there are in all."""
        rows = await self._pool.fetch(SQL["members"], organisation, limit, offset)
        total = await self._pool.fetchval(SQL["count_members"], organisation)
        return [_member(row) for row in rows], int(total)

    async def find(self, organisation: str, ref: str) -> OrganisationMember:
        """A member by the person's id, e-mail address or name. Raises NotFound, and Conflict when
        several members have the name."""
        rows = await self._pool.fetch(SQL["members_named"], organisation, ref)
        exact = [row for row in rows if row["id"] == ref or row["email"].lower() == ref.lower()]
        if not rows:
            raise NotFound(f"there is no member {ref[:80]!r}; `headrace member list` shows all")
        if len(rows) > 1 and not exact:
            ids = ", ".join(row["id"] for row in rows)
            raise Conflict(f"several members have the name {ref}: {ids}; give one of these ids")
        return _member(exact[0] if exact else rows[0])

    async def add(self, organisation: str, person: str, role: str, *, created_by: str) -> None:
        """Make a person (an id) a member. Raises Conflict for one who is a member already, and
        QuotaExceeded."""
        checked = check_role(role)
        async with self._changing(organisation) as connection:
            await insert_member(
                connection,
                organisation,
                person,
                checked,
                created_by=created_by,
                quotas=self._quotas,
            )

    async def change_role(self, organisation: str, person: str, role: str) -> None:
        """Give a member another role, which its API keys have from now on. Raises NotFound, and
        Conflict for the last owner, and for a role that groups of the sign-in provider give."""
        checked = check_role(role)
        async with self._changing(organisation) as connection:
            if (await _member_in(connection, organisation, person))["from_groups"]:
                raise Conflict(
                    f"the role of {person} comes from groups of the sign-in provider; change the groups "
                    "there, or remove the member and send an invitation"
                )
            await change_role(connection, organisation, person, checked)

    async def remove(self, organisation: str, person: str) -> None:
        """Remove a member, whose API keys in the organisation are refused from now on. Raises
        NotFound, and Conflict for the last owner."""
        async with self._changing(organisation) as connection:
            await remove_member(connection, organisation, person)

    async def remove_person(self, person: str) -> None:
        """Remove a person from all organisations and from the installation. Raises Conflict for the
        last owner of an organisation."""
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute(SQL["lock_person"], person)
            rows = await connection.fetch(SQL["organisations_of_person"], person)
            for row in rows:
                await connection.execute(SQL["lock_organisation"], row["organisation"])
            for row in rows:
                await remove_member(connection, row["organisation"], person)
            await connection.execute(SQL["mark_removed"], person)
        self._changed()

    @asynccontextmanager
    async def _changing(self, organisation: str) -> AsyncIterator[Any]:
        """A transaction that changes the members of an organisation, one at a time."""
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute(SQL["lock_organisation"], organisation)
            yield connection
        self._changed()


async def insert_member(
    connection: Any,
    organisation: str,
    person: str,
    role: Role,
    *,
    created_by: str,
    quotas: Quotas,
) -> None:
    """Make a person a member within a transaction that has locked the organisation. Raises Conflict for
    one who is a member already, and QuotaExceeded."""
    await quotas.check_members(connection, organisation)
    row = await connection.fetchrow(SQL["insert_member"], organisation, person, role, created_by)
    if row is None:
        raise Conflict(f"{person} is a member already; `headrace member role` changes the role")


def check_role(text: str) -> Role:
    """A role by its name. Raises InvalidConfig."""
    for role in get_args(Role):
        if role == text:
            found: Role = role
            return found
    message = f"{text[:40]!r} is not a role; choose from {', '.join(get_args(Role))}"
    raise InvalidConfig(message, issues=(Issue("role", message),))


async def change_role(connection: Any, organisation: str, person: str, role: Role) -> None:
    """Give a member another role within a transaction that has locked the organisation. Raises
    NotFound, and LastOwner."""
    before = await _member_in(connection, organisation, person)
    if before["role"] == "owner" and role != "owner":
        await _check_other_owner(connection, organisation, person)
    await connection.execute(SQL["set_role"], organisation, person, role)
    if role != "owner":
        await connection.execute(SQL["delete_invitations_of_member"], organisation, person)


async def remove_member(connection: Any, organisation: str, person: str) -> None:
    """Remove a member within a transaction that has locked the organisation. Raises NotFound, and
    LastOwner."""
    if (await _member_in(connection, organisation, person))["role"] == "owner":
        await _check_other_owner(connection, organisation, person)
    # The login before the member, as a login that becomes a key locks them. What a member makes is made
    # under a lock of the membership, so after its end all that was made can be seen.
    for query in (
        "delete_device_logins_of_member",
        "delete_member",
        "revoke_keys_of_member",
        "delete_invitations_of_member",
    ):
        await connection.execute(SQL[query], organisation, person)


async def _member_in(connection: Any, organisation: str, person: str) -> Any:
    rows = await connection.fetch(SQL["members_named"], organisation, person)
    found = next((row for row in rows if row["id"] == person), None)
    if found is None:
        raise NotFound(f"there is no member {person[:80]!r}; `headrace member list` shows all")
    return found


async def _check_other_owner(connection: Any, organisation: str, person: str) -> None:
    if not await connection.fetchval(SQL["other_owners"], organisation, person):
        raise LastOwner(
            f"{person} is the last owner of this organisation; make another member an owner first"
        )


def _member(row: Any) -> OrganisationMember:
    return OrganisationMember(person_of(row), row["role"], row["joined_at"], row["from_groups"])
