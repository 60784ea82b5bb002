"""People: they have a name and an e-mail address, are members of organisations, and own API keys.

The id of a person is readable (`ada-lovelace-k3f9x2`), is never used again, and is the owner of the
person's API keys. So lists, the audit list and the log name people without their addresses.
"""

import re
import secrets
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import asyncpg

from infra.identity.api_key_format import ID_DIGITS
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound

SQL = queries("infra/identity/people.sql")

EMAIL = re.compile(r"[^\s@<>\"',;:\\()\[\]\x00-\x1f\x7f]{1,64}@[A-Za-z0-9][A-Za-z0-9.-]{0,188}")
"""The form of an e-mail address. Whether it exists shows when somebody writes to it."""

LONGEST_NAME = 100
LONGEST_SLUG = 40
ID_TAIL = 6


@dataclass(frozen=True, slots=True)
class Person:
    """A person. One who was removed from the installation has `removed_at`."""

    id: str
    name: str
    email: str
    created_at: datetime
    removed_at: datetime | None = None


class People:
    """Adds, finds and lists people."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def add(self, name: str, email: str, *, created_by: str) -> Person:
        """Add a person. Raises InvalidConfig for a name or an address that cannot be one, and Conflict
        when somebody has the address."""
        name, email = check_person_name(name), check_email(email)
        async with self._pool.acquire() as connection:
            return await insert_person(connection, name, email, created_by=created_by)

    async def find(self, person: str) -> Person:
        """A person by id, also one who was removed. Raises NotFound."""
        row = await self._pool.fetchrow(SQL["person"], person)
        if row is None:
            raise NotFound(f"there is no person {person[:80]!r}; `headrace person list` shows all")
        return person_of(row)

    async def find_all(self, people: Collection[str]) -> dict[str, Person]:
        """Those of these people (ids) who are known, by id, also those who were removed."""
        rows = await self._pool.fetch(SQL["people_with_ids"], list(people))
        return {row["id"]: person_of(row) for row in rows}

    async def find_named(self, ref: str) -> Person:
        """A person by id or e-mail address. Raises NotFound."""
        row = await self._pool.fetchrow(SQL["person_with_email"], ref)
        return person_of(row) if row is not None else await self.find(ref)

    async def page(self, *, removed: bool, limit: int, offset: int) -> tuple[list[Person], int]:
        """A page of people in the order in which they came, and how many there are in all; with
        `removed` also those who were removed."""
        rows = await self._pool.fetch(SQL["people"], removed, limit, offset)
        total = await self._pool.fetchval(SQL["count_people"], removed)
        return [person_of(row) for row in rows], int(total)

    async def organisations_of(self, person: str) -> Sequence[tuple[str, str]]:
        """The organisations (ids) of a person, with the role in each."""
        rows = await self._pool.fetch(SQL["organisations_of_person"], person)
        return [(row["organisation"], row["role"]) for row in rows]


async def insert_person(connection: Any, name: str, email: str, *, created_by: str) -> Person:
    """Add a person within a transaction. Raises Conflict when somebody has the address."""
    try:
        row = await connection.fetchrow(
            SQL["insert_person"], _new_id(name), name, email, created_by
        )
    except asyncpg.UniqueViolationError as error:
        raise Conflict(
            f"there is a person with the address {email}; invite them, or use another address"
        ) from error
    return person_of(row)


async def keep_membership(connection: Any, organisation: str | None, person: str) -> str | None:
    """The role of a person in an organisation, which stays so until the transaction ends; None for
    somebody who is not a member."""
    role: str | None = await connection.fetchval(SQL["keep_membership"], organisation, person)
    return role


def check_person_name(text: str) -> str:
    """The name of a person, without space around it. Raises InvalidConfig."""
    name = " ".join(unicodedata.normalize("NFC", text).split())
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        message = f"must be 1 to {LONGEST_NAME} printable characters, got {text[:40]!r}"
        raise InvalidConfig(f"name {message}", issues=(Issue("name", message),))
    return name


def check_email(text: str) -> str:
    """An e-mail address, without space around it, in NFC. Raises InvalidConfig, also for a letter that
    some databases take for one of ASCII (the Kelvin sign for `k`), so that no address means another
    person's."""
    email = unicodedata.normalize("NFC", text.strip())
    is_odd = not email.isprintable() or any(_is_lookalike(letter) for letter in text)
    if is_odd or not EMAIL.fullmatch(email):
        message = f"must be an address such as ada@example.org, got {text[:80]!r}"
        raise InvalidConfig(f"email {message}", issues=(Issue("email", message),))
    return email


def _is_lookalike(letter: str) -> bool:
    """Whether a letter outside of ASCII becomes one of ASCII in small letters or in NFKC."""
    plain = unicodedata.normalize("NFKC", letter).lower()
    return not letter.isascii() and plain[:1].isascii()


def person_of(row: Any) -> Person:
    """The person in a row with the columns of the part `person_columns` of the queries."""
    return Person(row["id"], row["name"], row["email"], row["created_at"], row["removed_at"])


def _new_id(name: str) -> str:
    """A new id: the letters of the name, and random ones."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain)[:LONGEST_SLUG].strip("-") or "person"
    return f"{slug}-{''.join(secrets.choice(ID_DIGITS) for _ in range(ID_TAIL))}"
