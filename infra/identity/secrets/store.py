"""Secrets on Postgres, in the table `secrets`. Values are sealed before they get there."""

import asyncio
import time
from collections.abc import Mapping, Sequence

from infra.identity.secrets.sealed import Sealer
from infra.ports.secrets import SecretOwner, StoredSecret
from infra.spine.postgres.pool import Database, Row
from schemas.errors import Conflict
from schemas.secrets.rules import MOST_SECRETS, check_secret_name, check_secret_value
from schemas.secrets.secret_value import SecretValue

NOTED_S = 60
"""The time of the last use is written at most this often."""

PUT = (
    "insert into secrets as s (scope, owner, name, sealed, key, created_by, updated_by)"
    " select $1, $2, $3, $4, $5, $6, $6 where exists"
    " (select from secrets where scope = $1 and owner = $2 and name = $3)"
    " or (select count(*) from secrets where scope = $1 and owner = $2) < $7"
    " on conflict (scope, owner, name) do update set sealed = excluded.sealed, key = excluded.key,"
    " updated_by = excluded.updated_by, updated_at = clock_timestamp()"
    " returning xmax = 0 as is_new"
)

ALL = (
    "select scope, owner, name, key, created_at, created_by, updated_at, updated_by, used_at"
    " from secrets where (scope, owner) in (select * from unnest($1::text[], $2::text[]))"
    " order by scope, owner, name"
)

FOR_RUN = (
    "select distinct on (name) id, scope, owner, name, sealed, is_due from ("
    "select id, scope, owner, name, sealed, 2 as place,"
    " used_at is null or used_at < clock_timestamp() - make_interval(secs => $4) as is_due"
    " from secrets where name = any($1)"
    " and (scope = 'workspace' and owner = $2 or scope = 'personal' and owner = $3)"
    " union all"
    " select null, 'run', owner, name, sealed, 1, false from run_secrets"
    " where owner = $5 and name = any($1)) found"
    " order by name, place, scope"
)
"""A secret of the run alone comes first. A personal one comes before the workspace's, by the order of
the scopes' names."""

GIVE = (
    "insert into run_secrets (owner, name, sealed, key)"
    " select $1, * from unnest($2::text[], $3::bytea[], $4::text[])"
    " on conflict (owner, name) do update set sealed = excluded.sealed, key = excluded.key,"
    " created_at = clock_timestamp()"
)

TAKE_BACK = "delete from run_secrets where owner = $1"

LEFT_S = 300
"""How long a submission may take, from giving secrets to the event that requests its run."""

TAKE_LEFT_BACK = (
    "delete from run_secrets s where s.created_at < clock_timestamp() - make_interval(secs => $1)"
    " and not exists (select from runs r where r.run = s.owner"
    " and r.status in ('pending', 'running', 'unknown'))"
    " and not exists (select from evaluations e where e.evaluation = s.owner"
    " and e.status in ('pending', 'running', 'unknown'))"
    " and not exists (select from events e where e.run_id = s.owner and not exists"
    " (select from runs r where r.run = s.owner) and not exists"
    " (select from evaluations o where o.evaluation = s.owner))"
)
"""Secrets whose run ended, or was never requested. A run whose request the read model does not have yet
keeps them."""

REWRAPPED = (
    (
        "select scope, owner, name, sealed from secrets",
        "update secrets set sealed = $2, key = $3 where sealed = $1",
    ),
    (
        "select 'run' as scope, owner, name, sealed from run_secrets",
        "update run_secrets set sealed = $2, key = $3 where sealed = $1",
    ),
)
"""How the values are read that the current key has to wrap, and how one is replaced. Each has a random
part, so no two are equal."""


_Request = tuple[tuple[str, ...], str | None, str | None, str | None]
"""Names, workspace, submitter and run."""


class PostgresSecrets:
    """`infra.ports.secrets.SecretStore` on Postgres."""

    def __init__(self, database: Database, sealer: Sealer, *, cache_s: float = 0.0) -> None:
        """`cache_s` is how long `resolve` may return the same values without looking again."""
        self._pool = database.durable
        self._sealer = sealer
        self._cache_s = cache_s
        self._cache: dict[_Request, tuple[float, Mapping[str, SecretValue]]] = {}
        self._resolving = asyncio.Lock()

    async def put_secret(
        self, owner: SecretOwner, name: str, value: SecretValue, *, by: str
    ) -> bool:
        check_secret_name(name)
        check_secret_value(value.reveal())
        sealed = await self._sealer.seal(value.reveal(), owner=_sealing_owner(owner), field=name)
        key = self._sealer.key_of(sealed)
        row = await self._pool.fetchrow(
            PUT, owner.scope, owner.id, name, sealed, key, by, MOST_SECRETS
        )
        if row is None:
            raise too_many(owner)
        return bool(row["is_new"])

    async def all_secrets(self, owners: Sequence[SecretOwner]) -> Sequence[StoredSecret]:
        scopes, ids = [one.scope for one in owners], [one.id for one in owners]
        return [_to_stored_secret(row) for row in await self._pool.fetch(ALL, scopes, ids)]

    async def delete(self, owner: SecretOwner, name: str) -> bool:
        done = await self._pool.execute(
            "delete from secrets where scope = $1 and owner = $2 and name = $3",
            owner.scope,
            owner.id,
            name,
        )
        return done != "DELETE 0"

    async def missing(
        self, names: Sequence[str], *, workspace: str | None, submitter: str | None
    ) -> tuple[str, ...]:
        rows = await self._rows(names, workspace, submitter)
        found = {row["name"] for row in rows}
        return tuple(name for name in names if name not in found)

    async def resolve(
        self,
        names: Sequence[str],
        *,
        workspace: str | None,
        submitter: str | None,
        run: str | None = None,
    ) -> Mapping[str, SecretValue]:
        request = (tuple(names), workspace, submitter, run)
        async with self._resolving:
            until, values = self._cache.get(request, (0.0, {}))
            if time.monotonic() >= until:
                values = await self._open(*request)
                self._remember(request, values)
            return values

    async def give(self, run: str, values: Mapping[str, SecretValue]) -> None:
        sealed = {}
        for name, value in values.items():
            check_secret_name(name)
            check_secret_value(value.reveal())
            sealed[name] = await self._sealer.seal(value.reveal(), owner=f"run/{run}", field=name)
        keys = [self._sealer.key_of(one) for one in sealed.values()]
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute(TAKE_BACK, run)
            await connection.execute(GIVE, run, list(sealed), list(sealed.values()), keys)

    async def take_back(self, run: str) -> None:
        await self._pool.execute(TAKE_BACK, run)

    async def take_left_back(self, *, left_s: float = LEFT_S) -> None:
        """Delete the values that were given at least `left_s` seconds ago for runs and evaluations that
        do not go on: those that ended, and those that were never requested, because the process that
        took the submission died."""
        await self._pool.execute(TAKE_LEFT_BACK, float(left_s))

    def _remember(self, request: "_Request", values: Mapping[str, SecretValue]) -> None:
        """Keep values for a moment, and forget those whose moment is over."""
        now = time.monotonic()
        self._cache = {one: kept for one, kept in self._cache.items() if kept[0] > now}
        if self._cache_s:
            self._cache[request] = (now + self._cache_s, values)

    async def _open(
        self,
        names: Sequence[str],
        workspace: str | None,
        submitter: str | None,
        run: str | None,
    ) -> Mapping[str, SecretValue]:
        rows = await self._rows(names, workspace, submitter, run)
        opened = {}
        for row in rows:
            text = await self._sealer.open(
                row["sealed"], owner=f"{row['scope']}/{row['owner']}", field=row["name"]
            )
            opened[row["name"]] = SecretValue(text)
        if due := [row["id"] for row in rows if row["is_due"]]:
            await self._pool.execute(
                "update secrets set used_at = clock_timestamp() where id = any($1)", due
            )
        return opened

    async def rewrap(self) -> int:
        """Wrap the data keys of all secrets with the current key. Returns the number of secrets. A
        secret that changes meanwhile stays as it is, because the current key has sealed it."""
        count = 0
        for read, replace in REWRAPPED:
            rows = await self._pool.fetch(read)
            for row in rows:
                fresh = await self._sealer.rewrap(
                    row["sealed"], owner=f"{row['scope']}/{row['owner']}", field=row["name"]
                )
                await self._pool.execute(
                    replace,
                    row["sealed"],
                    fresh,
                    self._sealer.key_of(fresh),
                )
            count += len(rows)
        return count

    async def _rows(
        self,
        names: Sequence[str],
        workspace: str | None,
        submitter: str | None,
        run: str | None = None,
    ) -> Sequence[Row]:
        rows: Sequence[Row] = await self._pool.fetch(
            FOR_RUN, list(names), workspace, submitter, float(NOTED_S), run
        )
        return rows


def too_many(owner: SecretOwner) -> Conflict:
    """The error for an owner that has as many secrets as are allowed."""
    return Conflict(
        f"this {owner.scope} scope has {MOST_SECRETS} secrets already; delete one with: headrace "
        "secret delete NAME"
    )


def _sealing_owner(owner: SecretOwner) -> str:
    return f"{owner.scope}/{owner.id}"


def _to_stored_secret(row: Row) -> StoredSecret:
    return StoredSecret(
        owner=SecretOwner(row["scope"], row["owner"]),
        name=row["name"],
        key=row["key"],
        created_at=row["created_at"],
        created_by=row["created_by"],
        updated_at=row["updated_at"],
        updated_by=row["updated_by"],
        used_at=row["used_at"],
    )
