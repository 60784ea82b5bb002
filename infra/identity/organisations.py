"""Organisations: who shares an installation. A workspace belongs to one organisation, and a name is
unique within a workspace or an organisation.

What was there before there were organisations belongs to `main`, and so does a workspace that has no
row of its own.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol

from asyncpg import UniqueViolationError

from infra.identity.quotas import Quotas
from infra.ports.actor import MAIN
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound
from schemas.ids import is_id, short_id

SQL = queries("infra/identity/organisations.sql")

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
NAME_RULE = "a-z, 0-9 and '-', the first a letter or a digit, at most 63"

REPOSITORY = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}/[a-z0-9._-]{1,100}")
REPOSITORY_RULE = "write owner/repo, with letters, digits, '.', '_' and '-'"

LONGEST_TITLE = 200
MOST_SHOWN = 1000
"""A list of organisations has at most this many."""


@dataclass(frozen=True, slots=True)
class Organisation:
    """An organisation: its id, its name (a key, which does not change) and the title that people
    read."""

    id: str
    name: str
    title: str
    created_at: datetime
    created_by: str


@dataclass(frozen=True, slots=True)
class Home:
    """Whose a workspace is: the organisation (its id and its name), and the repository `owner/repo`
    that names the workspace within it, if any."""

    organisation: str = MAIN
    repository: str | None = None
    organisation_name: str = MAIN


class WorkspaceHomes(Protocol):
    """Whose each workspace is."""

    async def find_home(self, workspace: str) -> Home:
        """The home of a workspace (id); that of `main` for one that is not known."""
        ...

    async def put_workspace(self, workspace: str, organisation: str) -> None:
        """Record whose a workspace is. One that has a home keeps it. Raises QuotaExceeded when the
        organisation may have no more workspaces."""
        ...

    async def propose_repository(self, workspace: str, repository: str) -> None:
        """Name a workspace after its repository, unless it has a name, or another workspace of its
        organisation has this one."""
        ...

    async def set_repository(self, workspace: str, repository: str | None) -> None:
        """Name a workspace after a repository `owner/repo`, or with None after none. Another workspace
        of its organisation that had the name loses it. Raises Conflict when another request takes the
        name at the same time."""
        ...

    async def find_repository(
        self, repository: str, *, workspaces: Collection[str] | None
    ) -> Mapping[str, Home]:
        """The workspaces (ids) that a repository names, among these, with their homes; None means among
        all. Every organisation has at most one."""
        ...


class Organisations:
    """Organisations and homes of workspaces, on Postgres."""

    def __init__(self, database: Database, quotas: Quotas) -> None:
        self._pool = database.durable
        self._quotas = quotas

    async def make(
        self, name: str, title: str | None = None, *, by: str, reserved: Collection[str] = ()
    ) -> Organisation:
        """Make an organisation. `by` is who asks, and `reserved` are names that paths of the API use.
        Raises InvalidConfig for a name or title that is not allowed, and Conflict when the name is in
        use."""
        check_organisation_name(name, reserved=reserved)
        title = check_title(title or name)
        identity = short_id("organisation", name)
        made = await self._pool.fetchval(SQL["insert_organisation"], identity, name, title, by)
        if made is None:
            raise Conflict(f"there is an organisation {name} already; choose another name")
        return Organisation(identity, name, title, made, by)

    async def find(self, ref: str) -> Organisation:
        """An organisation by id or name. Raises NotFound."""
        row = await self._pool.fetchrow(SQL["organisation"], ref)
        if row is None:
            raise unknown_organisation(ref)
        return _organisation(row)

    async def list_visible(self, organisation: str | None) -> list[Organisation]:
        """The organisations, oldest first: only this one (an id), or all with None."""
        rows = await self._pool.fetch(SQL["organisations"], organisation, MOST_SHOWN)
        return [_organisation(row) for row in rows]

    async def set_title(self, organisation: str, title: str) -> Organisation:
        """Give an organisation (id) another title. Raises InvalidConfig and NotFound."""
        row = await self._pool.fetchrow(SQL["set_title"], organisation, check_title(title))
        if row is None:
            raise unknown_organisation(organisation)
        return _organisation(row)

    async def workspaces_of(self, organisation: str) -> frozenset[str]:
        """The workspaces (ids) of an organisation (id)."""
        rows = await self._pool.fetch(SQL["workspaces_of"], organisation)
        return frozenset(row["workspace"] for row in rows)

    async def find_home(self, workspace: str) -> Home:
        """See `WorkspaceHomes`."""
        row = await self._pool.fetchrow(SQL["home"], workspace)
        return Home() if row is None else Home(**row)

    async def home_of(self, workspace: str) -> str:
        """The organisation (id) of a workspace (id)."""
        return (await self.find_home(workspace)).organisation

    async def put_workspace(self, workspace: str, organisation: str) -> None:
        """See `WorkspaceHomes`."""
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute(SQL["lock_organisation"], organisation)
            if await connection.fetchval(SQL["is_known"], workspace, organisation):
                return
            await self._quotas.check_workspaces(connection, organisation)
            await connection.execute(SQL["put_home"], workspace, organisation)

    async def propose_repository(self, workspace: str, repository: str) -> None:
        """See `WorkspaceHomes`."""
        try:
            await self._pool.execute(SQL["propose_repository"], workspace, repository)
        except UniqueViolationError:  # another workspace took the name at this moment
            return

    async def set_repository(self, workspace: str, repository: str | None) -> None:
        """See `WorkspaceHomes`."""
        organisation = await self.home_of(workspace)
        try:
            async with self._pool.acquire() as connection, connection.transaction():
                if repository is not None:
                    await connection.execute(
                        SQL["free_repository"], organisation, repository, workspace
                    )
                await connection.execute(SQL["set_repository"], workspace, organisation, repository)
        except UniqueViolationError as error:
            raise Conflict(
                f"another request named a workspace {repository} at the same time; try again"
            ) from error

    async def find_repository(
        self, repository: str, *, workspaces: Collection[str] | None
    ) -> Mapping[str, Home]:
        """See `WorkspaceHomes`."""
        chosen = None if workspaces is None else list(workspaces)
        rows = await self._pool.fetch(SQL["workspaces_of_repository"], repository, chosen)
        return {workspace: Home(*home) for workspace, *home in rows}


class MemoryHomes:
    """`WorkspaceHomes` in memory."""

    def __init__(self) -> None:
        self._homes: dict[str, Home] = {}

    async def find_home(self, workspace: str) -> Home:
        return self._homes.get(workspace, Home())

    async def put_workspace(self, workspace: str, organisation: str) -> None:
        self._homes.setdefault(workspace, Home(organisation, organisation_name=organisation))

    async def propose_repository(self, workspace: str, repository: str) -> None:
        home = self._homes.get(workspace)
        if home is None or home.repository is not None:
            return
        if replace(home, repository=repository) not in self._homes.values():
            self._homes[workspace] = replace(home, repository=repository)

    async def set_repository(self, workspace: str, repository: str | None) -> None:
        home = await self.find_home(workspace)
        wanted = replace(home, repository=repository)
        for other, its in self._homes.items():
            if repository is not None and its == wanted:
                self._homes[other] = replace(its, repository=None)
        self._homes[workspace] = wanted

    async def find_repository(
        self, repository: str, *, workspaces: Collection[str] | None
    ) -> Mapping[str, Home]:
        return {
            workspace: home
            for workspace, home in sorted(self._homes.items())
            if home.repository == repository and (workspaces is None or workspace in workspaces)
        }


def check_organisation_name(name: str, *, reserved: Collection[str] = ()) -> None:
    """Raises InvalidConfig when an organisation cannot have this name."""
    if not NAME.fullmatch(name):
        message = f"{name[:80]!r} cannot name an organisation; use {NAME_RULE}"
    elif is_id(name):
        message = f"{name} could be the id of an organisation; choose another name"
    elif name in reserved:
        message = f"{name} is reserved, because paths of the API begin with it; choose another name"
    else:
        return
    raise InvalidConfig(message, issues=(Issue("name", message),))


def check_title(title: str) -> str:
    """A title without space around it. Raises InvalidConfig when it is empty, too long or not
    printable."""
    title = title.strip()
    if not title or len(title) > LONGEST_TITLE or not title.isprintable():
        message = f"the title must be printable text of at most {LONGEST_TITLE} characters"
        raise InvalidConfig(message, issues=(Issue("title", message),))
    return title


def repository_name(text: str) -> str:
    """The key of a repository `owner/repo`, in lower case. Raises InvalidConfig for any other text."""
    found = text.lower()
    if not text.isascii() or not REPOSITORY.fullmatch(found) or set(found.split("/")) & {".", ".."}:
        message = f"{text[:80]!r} cannot name a repository; {REPOSITORY_RULE}"
        raise InvalidConfig(message, issues=(Issue("repository", message),))
    return found


def repository_of_url(url: str) -> str | None:
    """The key `owner/repo` from the last two parts of a URL's path; None for a directory of the server,
    and for a URL without them."""
    found = re.fullmatch(r"(?:\w[\w+.-]*://[^/]+/|[^/\s]+@[^/:]+:)(.+)", url)
    if found is None or url.startswith("file:"):
        return None
    parts = found[1].strip("/").removesuffix(".git").split("/")
    try:
        return repository_name("/".join(parts[-2:]))
    except InvalidConfig:
        return None


def unknown_organisation(ref: str) -> NotFound:
    """The error for an organisation that does not exist, or that the sender may not see."""
    return NotFound(
        f"there is no organisation {ref[:80]!r}; `headrace org list` shows those that you may see"
    )


def _organisation(row: Any) -> Organisation:
    return Organisation(row["id"], row["name"], row["title"], row["created_at"], row["created_by"])
