"""Reserves the names of runs, workspaces, datasets and evaluations before the log has their events. It
also reserves idempotency keys (kind `request`), each for the hash of its request.

A name is unique within its scope: the id of a workspace for runs, evaluations and the datasets of a
workspace's API key, that of an organisation for workspaces and shared datasets, and nothing for what
belongs to none. A name is taken in one statement by the id that will use it. So two requests at the same
time never get the same name, even if the read model is far behind. Taking a name again for the same id
changes nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from infra.settings.sandbox_level import ONE_WORKSPACE
from infra.settings.settings import Settings
from infra.spine.postgres.pool import Database
from schemas.errors import Conflict, InvalidConfig

Kind = Literal["run", "workspace", "dataset", "evaluation", "request"]

MOST_NAMES = 1000
"""How many names a list of them has at most."""


@dataclass(frozen=True, slots=True)
class TakenName:
    """A name, the scope in which it is unique, and the id that holds it."""

    name: str
    scope: str
    id: str


class Names(Protocol):
    """The names of all kinds of things. A search in `scopes` finds names of these scopes alone; None
    means all scopes."""

    async def take(self, kind: Kind, name: str, thing: str, *, scope: str = "") -> str:
        """Take `name` for `thing` (an id). Returns the id that holds the name in this scope now, which
        may be another one."""
        ...

    async def find_id(self, kind: Kind, name: str, *, scope: str = "") -> str | None:
        """Return the id that holds a name in this scope, or None."""
        ...

    async def find_holders(
        self, kind: Kind, name: str, *, scopes: Collection[str] | None = None
    ) -> Sequence[TakenName]:
        """The holders of a name in these scopes, oldest first; at most 1000."""
        ...

    async def release(self, kind: Kind, name: str, thing: str) -> None:
        """Release a name that `thing` took and will not use."""
        ...

    async def all_names(
        self, kind: Kind, *, scopes: Collection[str] | None = None
    ) -> Sequence[TakenName]:
        """The names of this kind in these scopes, oldest first; at most 1000."""
        ...


class PostgresNames:
    """`Names` in the table `names`."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def take(self, kind: Kind, name: str, thing: str, *, scope: str = "") -> str:
        await self._pool.execute(
            "insert into names (kind, name, id, scope) values ($1, $2, $3, $4) on conflict do nothing",
            kind,
            name,
            thing,
            scope,
        )
        return await self.find_id(kind, name, scope=scope) or thing

    async def find_id(self, kind: Kind, name: str, *, scope: str = "") -> str | None:
        holder: str | None = await self._pool.fetchval(
            "select id from names where kind = $1 and name = $2 and scope = $3", kind, name, scope
        )
        return holder

    async def find_holders(
        self, kind: Kind, name: str, *, scopes: Collection[str] | None = None
    ) -> Sequence[TakenName]:
        rows = await self._pool.fetch(
            "select name, scope, id from names where kind = $1 and name = $2"
            " and ($3::text[] is null or scope = any($3)) order by created_at, id limit $4",
            kind,
            name,
            None if scopes is None else list(scopes),
            MOST_NAMES,
        )
        return [TakenName(row["name"], row["scope"], row["id"]) for row in rows]

    async def release(self, kind: Kind, name: str, thing: str) -> None:
        await self._pool.execute(
            "delete from names where kind = $1 and name = $2 and id = $3", kind, name, thing
        )

    async def all_names(
        self, kind: Kind, *, scopes: Collection[str] | None = None
    ) -> Sequence[TakenName]:
        rows = await self._pool.fetch(
            "select name, scope, id from names where kind = $1"
            " and ($2::text[] is null or scope = any($2)) order by created_at, id limit $3",
            kind,
            None if scopes is None else list(scopes),
            MOST_NAMES,
        )
        return [TakenName(row["name"], row["scope"], row["id"]) for row in rows]


def several_error(kind: str, name: str, holders: Sequence[tuple[str, str | None]]) -> Conflict:
    """The error for a name that several things have which the sender may see: the ids of these, each
    with the name of its workspace (None: of none)."""
    listed = ", ".join(f"{identity} ({place or 'no workspace'})" for identity, place in holders)
    return Conflict(
        f"{len(holders)} {kind}s have the name {name}: {listed}; give the id of one, or use an API key "
        "of its workspace"
    )


async def workspace_ids(database: Database) -> frozenset[str]:
    """Return the ids of all workspaces."""
    rows = await database.durable.fetch("select id from names where kind = 'workspace'")
    return frozenset(row["id"] for row in rows)


async def workspace_name(connection: Any, workspace: str) -> str:
    """The newest name of a workspace, to show it; its id when no name is taken for it."""
    name: str | None = await connection.fetchval(
        "select name from names where kind = 'workspace' and id = $1 order by created_at desc limit 1",
        workspace,
    )
    return name or workspace


async def check_one_workspace(database: Database, settings: Settings) -> None:
    """Raise InvalidConfig when there are several workspaces and the settings allow one."""
    if settings.has_one_workspace and (count := len(await workspace_ids(database))) > 1:
        raise InvalidConfig(f"there are {count} workspaces; {ONE_WORKSPACE}")


class MemoryNames:
    """`Names` in memory."""

    def __init__(self) -> None:
        self._held: dict[tuple[Kind, str, str], str] = {}

    async def take(self, kind: Kind, name: str, thing: str, *, scope: str = "") -> str:
        return self._held.setdefault((kind, name, scope), thing)

    async def find_id(self, kind: Kind, name: str, *, scope: str = "") -> str | None:
        return self._held.get((kind, name, scope))

    async def find_holders(
        self, kind: Kind, name: str, *, scopes: Collection[str] | None = None
    ) -> Sequence[TakenName]:
        known = await self.all_names(kind, scopes=scopes)
        return [taken for taken in known if taken.name == name]

    async def release(self, kind: Kind, name: str, thing: str) -> None:
        held = [
            key for key, holder in self._held.items() if (*key[:2], holder) == (kind, name, thing)
        ]
        for key in held:
            del self._held[key]

    async def all_names(
        self, kind: Kind, *, scopes: Collection[str] | None = None
    ) -> Sequence[TakenName]:
        return [
            TakenName(name, scope, thing)
            for (k, name, scope), thing in self._held.items()
            if k == kind and (scopes is None or scope in scopes)
        ][:MOST_NAMES]
