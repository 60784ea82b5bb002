"""The API keys of an installation, in the table `api_keys`."""

import hmac
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import asyncpg

from infra.identity.api_key_format import IssuedApiKey, issue_api_key
from infra.identity.people import keep_membership
from infra.ports.actor import CONTAINED, ROLE_SCOPES, SCOPES, ApiKeyScope, Role
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import Conflict, NotFound

SQL = queries("infra/identity/access.sql")

MOST_API_KEYS = 10_000
"""How many API keys may be valid at the same time."""

MOST_OF_ORGANISATION = 2_000
"""How many of them may belong to one organisation, so that none keeps the others from making theirs."""

MOST_KNOWN = 12_000
"""How many API keys a process knows: all valid ones, and the ones that were revoked last."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key without its secret. `workspace` (an id) is the only one that it is for; None means
    all, or all of `organisation` (an id; None for a key of the whole installation). After a rotation,
    the secret before it (`old_sha256`) is valid until `old_until`. `person` is the person (id) to whom
    it belongs, with that person's `role` in the organisation now (None: not a member any more). Both
    are None for a key that belongs to nobody."""

    id: str
    name: str
    owner: str
    prefix: str
    sha256: bytes
    scopes: frozenset[ApiKeyScope]
    workspace: str | None
    expires_at: datetime | None
    created_at: datetime
    created_by: str
    last_used_at: datetime | None
    revoked_at: datetime | None
    old_sha256: bytes | None = None
    old_until: datetime | None = None
    rotated_at: datetime | None = None
    organisation: str | None = None
    person: str | None = None
    role: Role | None = None

    @property
    def effective_scopes(self) -> frozenset[ApiKeyScope]:
        """The scopes that the key has and its person's role allows. A key that belongs to no person
        has all of its own."""
        if self.person is None:
            return self.scopes
        allowed = ROLE_SCOPES[self.role] if self.role is not None else frozenset()
        if self.scopes <= allowed:
            return self.scopes
        return allowed & frozenset(part for scope in self.scopes for part in CONTAINED[scope])

    @property
    def has_lost_its_person(self) -> bool:
        """Whether the key belongs to a person who is not a member of its organisation any more."""
        return self.person is not None and self.role is None

    @property
    def has_old_secret(self) -> bool:
        """Whether this is the API key of a secret that a rotation replaced (`with_secret`)."""
        return self.sha256 == self.old_sha256

    def with_secret(self, sha256: bytes) -> "ApiKey | None":
        """The API key as a secret opens it: one that was replaced makes it expire at `old_until`.
        None when the secret is of another key."""
        if hmac.compare_digest(self.sha256, sha256):
            return self
        if self.old_sha256 is not None and hmac.compare_digest(self.old_sha256, sha256):
            return replace(self, sha256=sha256, expires_at=self.old_until)
        return None

    def is_valid(self, now: datetime) -> bool:
        """Whether the API key is neither revoked nor expired, and its person is still a member."""
        is_alive = self.revoked_at is None and not self.has_lost_its_person
        return is_alive and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True)
class ApiKeyRequest:
    """The content of a new API key."""

    name: str
    owner: str
    scopes: frozenset[ApiKeyScope]
    workspace: str | None
    expires_at: datetime | None
    created_by: str
    organisation: str | None = None
    person: str | None = None


class NameInUse(Conflict):
    """An API key has the name already."""


class ApiKeys:
    """Creates, lists, rotates and revokes API keys."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def create(self, request: ApiKeyRequest) -> tuple[ApiKey, IssuedApiKey]:
        """Make an API key. Raises Conflict when its name is in use, or when there are too many
        keys."""
        async with self._pool.acquire() as connection:
            return await insert_api_key(connection, request)

    async def page(
        self,
        *,
        workspace: str | None,
        revoked: bool,
        limit: int,
        offset: int,
        organisation: str | None = None,
    ) -> tuple[list[ApiKey], int]:
        """A page of API keys, the newest first, and how many there are in all. With a workspace or an
        organisation only its own, and with `revoked` also those that were revoked."""
        reach = (workspace, organisation)
        rows = await self._pool.fetch(SQL["page_of_api_keys"], *reach, revoked, limit, offset)
        total = await self._pool.fetchval(SQL["count_api_keys"], *reach, revoked)
        return [api_key_of(row) for row in rows], int(total)

    async def find(
        self, ref: str, *, workspace: str | None, organisation: str | None = None
    ) -> ApiKey:
        """An API key by its id, prefix or name. With a workspace or an organisation only its keys are
        found. Raises NotFound, and Conflict when several keys have the name."""
        rows = await self._pool.fetch(SQL["api_keys_named"], ref, workspace, organisation)
        if not rows:
            raise NotFound(f"there is no API key {ref!r}; `headrace key list` shows all")
        found = api_key_of(rows[0])
        others = [row for row in rows[1:] if row["revoked_at"] is None]
        if found.revoked_at is None and others and ref == found.name:
            ids = ", ".join(row["id"] for row in (rows[0], *others))
            raise Conflict(
                f"several API keys have the name {ref}: {ids}; give one of these ids instead, and "
                "`headrace key list` shows whose they are"
            )
        return found

    async def revoke(
        self, ref: str, *, workspace: str | None, organisation: str | None = None
    ) -> ApiKey:
        """Revoke an API key, as `find` finds it. Revoking again changes nothing."""
        found = await self.find(ref, workspace=workspace, organisation=organisation)
        await self._pool.execute(SQL["revoke_api_key"], found.id)
        return found

    async def rotate(
        self, api_key: ApiKey, *, overlap_s: float, expires_at: datetime | None
    ) -> tuple[ApiKey, IssuedApiKey]:
        """Give an API key a new secret and a new expiry. The old secret stays valid for `overlap_s`
        seconds. Raises Conflict when the key was revoked."""
        issued = issue_api_key(api_key.id)
        row = await self._pool.fetchrow(
            SQL["rotate_api_key"], api_key.id, issued.sha256, overlap_s, expires_at
        )
        if row is None:
            raise Conflict(
                f"the API key {api_key.name} was revoked; make another one with "
                "`headrace key create`"
            )
        return api_key_of(row), issued

    async def mark(self) -> str:
        """A text that changes whenever an API key is created, rotated or revoked."""
        mark: str = await self._pool.fetchval(SQL["api_keys_mark"])
        return mark

    async def read_all(self) -> list[ApiKey]:
        """All valid API keys, and the ones that were revoked last."""
        return [
            api_key_of(row) for row in await self._pool.fetch(SQL["known_api_keys"], MOST_KNOWN)
        ]

    async def mark_used(self, times: dict[str, datetime]) -> None:
        """Record when API keys (their ids) were used last."""
        await self._pool.execute(SQL["mark_used"], list(times), list(times.values()))


async def insert_api_key(connection: Any, request: ApiKeyRequest) -> tuple[ApiKey, IssuedApiKey]:
    """Make an API key on a connection, which may be in a transaction. Raises Conflict when its name is
    in use, when there are too many keys, or when its person is not a member any more."""
    issued = issue_api_key()
    try:
        async with connection.transaction():
            if request.person is not None:
                role = await keep_membership(connection, request.organisation, request.person)
                if role is None:
                    raise Conflict(
                        f"{request.person} is not a member of the organisation any more; ask an owner "
                        "for an invitation"
                    )
            row = await connection.fetchrow(
                SQL["insert_api_key"],
                issued.id,
                request.name,
                request.owner,
                issued.prefix,
                issued.sha256,
                sorted(request.scopes),
                request.workspace,
                request.expires_at,
                request.created_by,
                MOST_API_KEYS,
                request.organisation,
                request.person,
                MOST_OF_ORGANISATION,
            )
    except asyncpg.UniqueViolationError as error:
        raise NameInUse(
            f"there is an API key with the name {request.name}; revoke it first, or choose "
            "another name"
        ) from error
    if row is None:
        raise Conflict(
            f"there are too many API keys: {MOST_OF_ORGANISATION} of an organisation may be valid, and "
            f"{MOST_API_KEYS} in all; revoke those that nobody uses"
        )
    return api_key_of(row), issued


def api_key_of(row: Any) -> ApiKey:
    """The API key in a row with the columns of the part `api_key_columns` of the queries."""
    return ApiKey(
        id=row["id"],
        name=row["name"],
        owner=row["owner"],
        prefix=row["prefix"],
        sha256=row["sha256"],
        scopes=frozenset(scope for scope in SCOPES if scope in row["scopes"]),
        workspace=row["workspace"],
        expires_at=row["expires_at"],
        created_at=row["created_at"],
        created_by=row["created_by"],
        last_used_at=row["last_used_at"],
        revoked_at=row["revoked_at"],
        old_sha256=row["old_sha256"],
        old_until=row["old_until"],
        rotated_at=row["rotated_at"],
        organisation=row["organisation"],
        person=row["person"],
        role=row["role"],
    )
