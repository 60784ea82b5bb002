"""Workspaces: git repositories with a name. Adding one requests a commit, and sync then fetches the
repository and examines its rollouts.

A workspace belongs to an organisation, and its name is unique there. Its id is derived from its name and
its organisation, and so is the cause of its first request. One name therefore means one repository, even
when several users add at the same time. Within its organisation a workspace may also be named by its
repository, `owner/repo`.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

from infra.identity.organisations import (
    Home,
    MemoryHomes,
    WorkspaceHomes,
    repository_name,
    repository_of_url,
    unknown_organisation,
)
from infra.names import Names, TakenName, several_error
from infra.ports.actor import (
    MAIN,
    is_confined,
    may_see,
    own_organisation,
    see_added,
    visible_organisation,
    visible_workspaces,
)
from infra.ports.services import Repositories
from infra.settings.sandbox_level import ONE_WORKSPACE
from infra.spine.ports.event_log import Cursor, EventStore, Recorded
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound, RepositoryAway
from schemas.events import CommitRequested
from schemas.ids import HEADRACE, WorkspaceId, derive_id, is_id, short_id, workspace_stream
from schemas.specs import CommitSpec

NAME = re.compile(r"^[a-z0-9][a-z0-9_-]{0,62}$")
REMOTE = re.compile(r"(?:(?:https?|ssh|git)://|[\w.-]+@[\w.-]+:).+")
"""The address of a repository on another machine."""

MOST_KEPT = 10_000
"""How many workspaces' first events are kept in memory."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A workspace. `organisation` is the id of the one that it belongs to, and `repository` is the
    `owner/repo` that names it there, if any."""

    id: WorkspaceId
    name: str
    url: str
    organisation: str = MAIN
    repository: str | None = None
    organisation_name: str = MAIN

    @property
    def setting_name(self) -> str:
        """The name under which settings of the operator name it. That of a workspace of `main` is its
        own name, and of another one ORGANISATION/NAME, so that no tenant takes what another has."""
        return self.name if self.organisation == MAIN else f"{self.organisation_name}/{self.name}"


class Workspaces:
    """Adds and finds workspaces. `is_only_one` refuses a second one (`Settings.has_one_workspace`)."""

    def __init__(
        self,
        log: EventStore,
        names: Names,
        repositories: Repositories,
        *,
        homes: WorkspaceHomes | None = None,
        is_only_one: bool = False,
    ) -> None:
        self._homes = homes or MemoryHomes()
        self._first: dict[str, CommitRequested] = {}  # they never change
        self._is_only_one = is_only_one
        self._log = log
        self._names = names
        self._repositories = repositories

    async def add(
        self,
        url: str,
        name: str | None = None,
        *,
        check: Callable[[str], Awaitable[object]] | None = None,
        organisation: str | None = None,
        repository: str | None = None,
    ) -> Recorded:
        """Register a repository, or fetch a registered one again. `check` replaces the check that
        `url` is a repository, for one that needs a credential. `organisation` (id) is whose it becomes;
        without one, that of the sender. `repository` is the `owner/repo` that names it; without one, it
        is read from the URL. Raises InvalidConfig for a bad name, Refused when `url` is not a
        repository, RepositoryAway when it does not answer now, NotFound for another organisation, and
        Conflict when the name belongs to another repository."""
        if name is not None and not NAME.fullmatch(name):
            message = (
                f"{name[:80]!r} cannot name a workspace; use a-z, 0-9, '-' and '_', at most 63"
            )
            raise InvalidConfig(message, issues=(Issue("name", message),))
        if name is not None and is_id(name):
            message = f"{name} could be the id of another workspace; choose another name"
            raise InvalidConfig(message, issues=(Issue("name", message),))
        named_by = repository_name(repository) if repository is not None else None
        organisation = _organisation_of(organisation)
        url = url.rstrip("/") if len(url) > 1 else url
        check_address(url)
        try:
            await (check or self._repositories.check)(url)
        except RepositoryAway as error:
            why = str(error).partition("; retrying")[0]
            raise RepositoryAway(
                f"no workspace was added: {why}; add it again when the server reaches the repository"
            ) from error
        if self._is_only_one and not await self._is_known(url):
            raise Conflict(f"there is a workspace already; {ONE_WORKSPACE}")
        for candidate in (name,) if name else _candidates(url):
            recorded = await self._request_commit(url, candidate, organisation)
            if recorded is not None:
                see_added(recorded.event.run_id)
                await self._name_by(recorded.event.run_id, url, named_by)
                return recorded
        raise Conflict(
            f"the name {name} is already used by a workspace of another repository; choose another name "
            "with --name"
        )

    async def _is_known(self, url: str) -> bool:
        """Whether there is no workspace yet, or the only one is of this repository."""
        found = [
            await self._find_id(taken.id) for taken in await self._names.all_names("workspace")
        ]
        return all(one is None or one.url == url for one in found)

    async def _request_commit(self, url: str, name: str, organisation: str) -> Recorded | None:
        """Request the commit under this name. None when the name belongs to another repository."""
        key = name if organisation == MAIN else f"{organisation}/{name}"
        identity = WorkspaceId(short_id("workspace", key))
        requested = CommitRequested(
            workspace=identity, workspace_name=name, commit=CommitSpec(url=url)
        )
        await self._homes.put_workspace(identity, organisation)
        await self._names.take("workspace", name, identity, scope=organisation)
        known = await self._log.read(
            identity, after=Cursor(), limit=1, types=[CommitRequested.type]
        )
        [first] = await self._log.append([requested], cause=derive_id(HEADRACE, f"workspace/{key}"))
        if not isinstance(first.event, CommitRequested) or first.event.commit.url != url:
            return None
        if known:
            [again] = await self._log.append([requested], cause=uuid4())
            return again
        return first

    async def _name_by(self, workspace: str, url: str, repository: str | None) -> None:
        """Name a workspace after this repository, or after that of its URL if the name is free."""
        if repository is not None:
            await self._homes.set_repository(workspace, repository)
        elif (read := repository_of_url(url)) is not None:
            await self._homes.propose_repository(workspace, read)

    async def set_repository(self, ref: str, repository: str | None) -> Workspace:
        """Name a workspace after a repository `owner/repo` (None: after none), for example when it moved
        to another owner. The name before is free again, and another workspace of the organisation that
        had the new name loses it. Raises NotFound, InvalidConfig and Conflict."""
        named_by = repository_name(repository) if repository is not None else None
        workspace = await self.find_workspace(ref)
        await self._homes.set_repository(workspace.id, named_by)
        return await self.find_workspace(workspace.id)

    async def find_workspace(self, ref: str, *, organisation: str | None = None) -> Workspace:
        """A workspace by name, id or `owner/repo`, with `organisation` (id) only one of that. Raises
        NotFound, and Conflict when several have the name."""
        if "/" in ref:
            return await self.of_repository(ref, organisation=organisation)
        if is_id(ref):  # the id of one workspace, even if another has it as its name
            found = await self._find_id(ref)
            if found is not None and _is_visible(found, organisation):
                return found
        holders = await self._holders(ref, organisation)
        if len(holders) > 1:
            raise await self._several(ref, [taken.id for taken in holders])
        found = await self._find_id(holders[0].id if holders else ref)
        if found is not None and _is_visible(found, organisation):
            return found
        raise NotFound(
            f"there is no workspace {ref[:80]!r} (there are: {await self._list_names()}); "
            "`headrace workspace add PATH` adds one"
        )

    async def of_repository(self, repository: str, *, organisation: str | None = None) -> Workspace:
        """The workspace that a repository `owner/repo` names. Raises NotFound, and Conflict when the
        repository names a workspace in several organisations that the sender may see."""
        homes: Mapping[str, Home] = {}
        try:
            key = repository_name(repository)
        except InvalidConfig:
            key = ""
        if key:
            homes = await self._homes.find_repository(key, workspaces=visible_workspaces())
        every = [await self._find_id(identity, home) for identity, home in homes.items()]
        found = [one for one in every if one]
        found = [one for one in found if _is_visible(one, organisation)]
        if len(found) > 1:
            raise await self._several(repository, [one.id for one in found])
        if found:
            return found[0]
        raise NotFound(
            f"no workspace is of the repository {repository[:80]!r}; `headrace workspace add URL "
            "--repository OWNER/REPO` adds one, and `headrace workspace repository` names one"
        )

    async def _several(self, ref: str, ids: Sequence[str]) -> Conflict:
        homes = [(each, (await self._homes.find_home(each)).organisation_name) for each in ids]
        return several_error("workspace", ref, homes)

    async def _holders(self, name: str, organisation: str | None = None) -> Sequence[TakenName]:
        """The workspaces with this name that the task may see."""
        taken = await self._names.find_holders("workspace", name, scopes=_scopes(organisation))
        return [one for one in taken if may_see(one.id)]

    async def _known_names(self) -> Sequence[TakenName]:
        """The names of the workspaces that this task may see."""
        known = await self._names.all_names("workspace", scopes=_scopes())
        return [taken for taken in known if may_see(taken.id)]

    async def _list_names(self) -> str:
        return ", ".join(dict.fromkeys(taken.name for taken in await self._known_names())) or "none"

    async def _find_id(self, identity: str, home: Home | None = None) -> Workspace | None:
        """The workspace of an id, or None. `home` is given where it is known."""
        event = self._first.get(identity) or await self._read_first(identity)
        if event is None:
            return None
        if len(self._first) >= MOST_KEPT:
            self._first.clear()
        self._first[identity] = event
        home = home or await self._homes.find_home(event.workspace)
        return Workspace(
            WorkspaceId(event.workspace),
            event.workspace_name,
            event.commit.url,
            home.organisation,
            home.repository,
            home.organisation_name,
        )

    async def _read_first(self, identity: str) -> CommitRequested | None:
        """The event that added a workspace. One that was just added is not below the horizon yet, so its
        stream itself is read when the index does not have it."""
        types = [CommitRequested.type]
        found = await self._log.read(identity, after=Cursor(), limit=1, types=types)
        if not found:
            stream = workspace_stream(identity)
            found = (await self._log.load({stream: 0}, limit=1))[stream]
        events = [one.event for one in found if isinstance(one.event, CommitRequested)]
        return events[0] if events else None

    async def find_url(
        self, url: str, name: str | None = None, *, organisation: str | None = None
    ) -> Workspace | None:
        """The workspace of a URL in an organisation (id; without one, that of the sender), or None: that
        of the name if one is given, else the one that `add` would fetch again, else the first one of
        that URL under another name."""
        url = url.rstrip("/") if len(url) > 1 else url
        scopes = (_organisation_of(organisation), "")
        taken = () if name else await self._names.all_names("workspace", scopes=scopes)
        others = [one.name for one in taken]
        for candidate in (name,) if name else dict.fromkeys((*_candidates(url), *others)):
            for holder in await self._names.find_holders("workspace", candidate, scopes=scopes):
                found = await self._find_id(holder.id)
                if found is not None and found.url == url and may_see(found.id):
                    return found
        return None

    async def visible(self, *, organisation: str | None = None) -> Sequence[Workspace]:
        """The workspaces that this task may see, by name; with `organisation` (id) only those of it."""
        known = sorted(await self._known_names(), key=lambda taken: (taken.name, taken.scope))
        found = [await self._find_id(taken.id) for taken in known]
        return [one for one in found if one is not None and _is_visible(one, organisation)]

    async def choose(self, ref: str | None) -> Workspace:
        """The named workspace, or the only one. Raises NotFound, InvalidConfig."""
        if ref is not None:
            return await self.find_workspace(ref)
        known = await self._known_names()
        if not known:
            raise NotFound("there is no workspace yet; `headrace workspace add PATH` adds one")
        if len(known) > 1:
            message = (
                f"is not given, and there are several; name one of: {await self._list_names()} "
                "(--workspace)"
            )
            raise InvalidConfig(f"workspace {message}", issues=(Issue("workspace", message),))
        return await self.find_workspace(known[0].id)


def check_address(url: str) -> None:
    """Raises InvalidConfig when the sender may not name this place: a directory of the server is for API
    keys of the whole installation."""
    if is_confined() and not REMOTE.fullmatch(url):
        message = (
            f"{url[:80]!r} is a directory of the server, which an API key of an organisation cannot "
            "add; give the address of a repository"
        )
        raise InvalidConfig(message, issues=(Issue("url", message),))


def _scopes(organisation: str | None = None) -> tuple[str, ...] | None:
    """Where the names of workspaces are searched: in this organisation, or in those that the task may
    see. None means all."""
    chosen = organisation or visible_organisation()
    return None if chosen is None else (chosen, "")


def _organisation_of(wanted: str | None) -> str:
    """The organisation (id) of a new workspace. Raises NotFound for one that the sender may not see."""
    own = visible_organisation()
    if own is not None and wanted not in (None, own):
        raise unknown_organisation(wanted or "")
    return wanted or own_organisation()


def _is_visible(workspace: Workspace, organisation: str | None) -> bool:
    return may_see(workspace.id) and organisation in (None, workspace.organisation)


def _candidates(url: str) -> tuple[str, str]:
    """Names for a repository without a name: its own name, or that name with a digest."""
    last = url.rstrip("/").rpartition("/")[2].rpartition(":")[2].removesuffix(".git").lower()
    base = re.sub(r"[^a-z0-9_-]+", "-", last).strip("-_")[:50] or "workspace"
    if is_id(base):  # it could be that of another workspace
        base = f"workspace-{base}"
    return base, f"{base}-{short_id('url', url)[:6]}"
