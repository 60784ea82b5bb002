"""Reserves the names of runs, workspaces, datasets and evaluations before the log has their events. It
also reserves idempotency keys (kind `request`), each for the hash of its request.

A name is taken in one statement by the id that will use it. So two requests at the same time never get
the same name, even if the read model is far behind. Taking a name again for the same id changes nothing.
"""

from typing import Any, Literal, Protocol

from infra.settings.sandbox_level import ONE_WORKSPACE
from infra.settings.settings import Settings
from infra.spine.postgres.pool import Database
from schemas.errors import InvalidConfig

Kind = Literal["run", "workspace", "dataset", "evaluation", "request"]


class Names(Protocol):
    async def take(self, kind: Kind, name: str, thing: str) -> str:
        """Take `name` for `thing` (an id). Returns the id that holds the name now, which may be another
        one."""
        ...

    async def find_id(self, kind: Kind, name: str) -> str | None:
        """Return the id that holds a name, or None."""
        ...

    async def release(self, kind: Kind, name: str, thing: str) -> None:
        """Release a name that `thing` took and will not use."""
        ...

    async def all_names(self, kind: Kind) -> dict[str, str]:
        """Return the names of this kind and their ids, oldest first; at most 1000."""
        ...


class PostgresNames:
    """`Names` in the table `names`."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def take(self, kind: Kind, name: str, thing: str) -> str:
        await self._pool.execute(
            "insert into names (kind, name, id) values ($1, $2, $3) on conflict do nothing",
            kind,
            name,
            thing,
        )
        return await self.find_id(kind, name) or thing

    async def find_id(self, kind: Kind, name: str) -> str | None:
        holder: str | None = await self._pool.fetchval(
            "select id from names where kind = $1 and name = $2", kind, name
        )
        return holder

    async def release(self, kind: Kind, name: str, thing: str) -> None:
        await self._pool.execute(
            "delete from names where kind = $1 and name = $2 and id = $3", kind, name, thing
        )

    async def all_names(self, kind: Kind) -> dict[str, str]:
        rows = await self._pool.fetch(
            "select name, id from names where kind = $1 order by created_at limit 1000", kind
        )
        return {row["name"]: row["id"] for row in rows}


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
        self._held: dict[tuple[Kind, str], str] = {}

    async def take(self, kind: Kind, name: str, thing: str) -> str:
        return self._held.setdefault((kind, name), thing)

    async def find_id(self, kind: Kind, name: str) -> str | None:
        return self._held.get((kind, name))

    async def release(self, kind: Kind, name: str, thing: str) -> None:
        if self._held.get((kind, name)) == thing:
            del self._held[(kind, name)]

    async def all_names(self, kind: Kind) -> dict[str, str]:
        return {name: thing for (k, name), thing in self._held.items() if k == kind}
