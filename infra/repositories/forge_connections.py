"""Connections of workspaces to the forges of their repositories, with the secrets sealed.

The secret of a webhook that was replaced stays valid for a day, because the forge may still sign with
it. Whether it is valid is decided by the database's clock.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from infra.identity.secrets.sealed import Sealer
from infra.repositories.git.credentials import (
    AppCredential,
    Credential,
    KeyCredential,
    TokenCredential,
)
from infra.spine.postgres.pool import Database, Row
from schemas.events import ForgeKind

KEPT_HOURS = 24
"""How long the secret before a rotation stays valid."""

SECRET_BYTES = 32

KINDS: dict[str, type[Credential]] = {
    "token": TokenCredential,
    "key": KeyCredential,
    "app": AppCredential,
}

SEALED = {"secret": "secret", "previous_secret": "secret", "credential": "credential"}
"""The columns with sealed values, and the field that each was sealed for."""

READ = (
    "select workspace, forge, url, hook, secret, credential,"
    " case when previous_until > clock_timestamp() then previous_secret end as previous_secret"
    " from connections where $1::text is null or workspace = $1 order by workspace"
)


@dataclass(frozen=True, slots=True)
class ForgeConnection:
    """A workspace's connection to its forge. `hook` is the id that the forge gave to the webhook.
    `secrets` are those of the webhook that are valid now, the newest first."""

    workspace: str
    forge: ForgeKind
    url: str
    hook: str | None = None
    secrets: tuple[str, ...] = field(default=(), repr=False)
    credential: Credential | None = None


@dataclass(frozen=True, slots=True)
class ConnectedRepository:
    """A connected workspace and the address of its repository, without any secret."""

    workspace: str
    url: str


class ForgeConnections:
    """The table `connections`. Methods that read raise InvalidConfig when a secret does not open with
    this process's key."""

    def __init__(self, database: Database, sealer: Sealer) -> None:
        self._pool = database.durable
        self._sealer = sealer

    async def get_connection(self, workspace: str) -> ForgeConnection | None:
        """Return the connection of a workspace (its id), or None."""
        row = await self._pool.fetchrow(READ, workspace)
        return None if row is None else await self._open(row)

    async def all_connections(self) -> Sequence[ForgeConnection]:
        """Return all connections, by workspace."""
        rows = await self._pool.fetch(READ, None)
        return [await self._open(row) for row in rows]

    async def repositories(self) -> Sequence[ConnectedRepository]:
        """Return all connected repositories. No secret is opened, so a connection whose key is lost
        does not hide the others."""
        rows = await self._pool.fetch("select workspace, url from connections order by workspace")
        return [ConnectedRepository(row["workspace"], row["url"]) for row in rows]

    async def put_connection(
        self,
        workspace: str,
        *,
        forge: ForgeKind,
        url: str,
        credential: Credential | None = None,
        secret: str | None = None,
    ) -> ForgeConnection:
        """Connect a workspace, or change its connection. Without `secret` the secret stays, and a new
        connection gets a random one. Without `credential` the credential stays. A connection that
        changes its forge or URL loses the hook and the credential, because they belong to the other
        repository."""
        sealed = None if credential is None else await self._seal_credential(workspace, credential)
        await self._pool.execute(
            "insert into connections as c (workspace, forge, url, secret, credential)"
            " values ($1, $2, $3, $4, $5) on conflict (workspace) do update set"
            " forge = excluded.forge, url = excluded.url,"
            " secret = case when $6 then excluded.secret else c.secret end,"
            " hook = case when c.forge = excluded.forge and c.url = excluded.url then c.hook end,"
            " credential = coalesce(excluded.credential, case when c.forge = excluded.forge"
            " and c.url = excluded.url then c.credential end),"
            " updated_at = clock_timestamp()",
            workspace,
            forge,
            url,
            await self._seal_secret(workspace, secret or _new_secret()),
            sealed,
            secret is not None,
        )
        return await self._reread(workspace)

    async def set_hook(self, workspace: str, hook: str | None) -> None:
        """Record the webhook that the forge has for this workspace."""
        await self._pool.execute(
            "update connections set hook = $2, updated_at = clock_timestamp() where workspace = $1",
            workspace,
            hook,
        )

    async def rotate(self, workspace: str, *, now: bool = False) -> ForgeConnection | None:
        """Give the webhook a new secret. The one before stays valid for a day, or with `now` not at
        all. Returns the connection, or None when there is none."""
        changed = await self._pool.execute(
            "update connections set secret = $2,"
            " previous_secret = case when $3 then null else secret end,"
            " previous_until = case when $3 then null"
            " else clock_timestamp() + make_interval(hours => $4) end,"
            " updated_at = clock_timestamp() where workspace = $1",
            workspace,
            await self._seal_secret(workspace, _new_secret()),
            now,
            KEPT_HOURS,
        )
        return None if changed == "UPDATE 0" else await self.get_connection(workspace)

    async def drop(self, workspace: str) -> None:
        """Forget the connection of a workspace, with its secrets."""
        await self._pool.execute("delete from connections where workspace = $1", workspace)

    async def rewrap(self) -> int:
        """Wrap the data keys of all sealed values with the current key. Returns the number of values. A
        value that changes meanwhile stays as it is, because the current key has sealed it."""
        done = 0
        for column, sealed_for in SEALED.items():
            rows = await self._pool.fetch(
                f"select workspace, {column} as sealed from connections where {column} is not null"  # noqa: S608 - our own names
            )
            for row in rows:
                fresh = await self._sealer.rewrap(
                    row["sealed"], owner=row["workspace"], field=sealed_for
                )
                await self._pool.execute(
                    f"update connections set {column} = $3 where workspace = $1 and {column} = $2",  # noqa: S608 - our own names
                    row["workspace"],
                    row["sealed"],
                    fresh,
                )
            done += len(rows)
        return done

    async def _reread(self, workspace: str) -> ForgeConnection:
        found = await self.get_connection(workspace)
        if found is None:
            raise LookupError(f"the connection of {workspace} was removed while it was written")
        return found

    async def _open(self, row: Row) -> ForgeConnection:
        workspace = row["workspace"]
        sealed = [one for one in (row["secret"], row["previous_secret"]) if one is not None]
        return ForgeConnection(
            workspace=workspace,
            forge=row["forge"],
            url=row["url"],
            hook=row["hook"],
            secrets=tuple(
                [await self._sealer.open(one, owner=workspace, field="secret") for one in sealed]
            ),
            credential=await self._open_credential(workspace, row["credential"]),
        )

    async def _seal_secret(self, workspace: str, secret: str) -> bytes:
        return await self._sealer.seal(secret, owner=workspace, field="secret")

    async def _seal_credential(self, workspace: str, credential: Credential) -> bytes:
        kind = next(name for name, made in KINDS.items() if isinstance(credential, made))
        text = json.dumps({"kind": kind, **asdict(credential)})
        return await self._sealer.seal(text, owner=workspace, field="credential")

    async def _open_credential(self, workspace: str, sealed: bytes | None) -> Credential | None:
        if sealed is None:
            return None
        opened = await self._sealer.open(sealed, owner=workspace, field="credential")
        held = json.loads(opened)
        return KINDS[held.pop("kind")](**held)


def _new_secret() -> str:
    return secrets.token_hex(SECRET_BYTES)
