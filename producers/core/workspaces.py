"""Workspaces: git repositories with a name. Adding one requests a commit, and sync then fetches the
repository and examines its rollouts.

A workspace's id is derived from its name, and so is the cause of its first request. One name therefore
means one repository, even when several users add at the same time.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

from infra.names import Names
from infra.ports.actor import may_see
from infra.ports.services import Repositories
from infra.settings.sandbox_level import ONE_WORKSPACE
from infra.spine.ports.event_log import Cursor, EventStore, Recorded
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound
from schemas.events import CommitRequested
from schemas.ids import HEADRACE, WorkspaceId, derive_id, short_id, workspace_stream
from schemas.specs import CommitSpec

NAME = re.compile(r"^[a-z0-9][a-z0-9_-]{0,62}$")


@dataclass(frozen=True, slots=True)
class Workspace:
    id: WorkspaceId
    name: str
    url: str


class Workspaces:
    """Adds and finds workspaces. `is_only_one` refuses a second one (`Settings.has_one_workspace`)."""

    def __init__(
        self,
        log: EventStore,
        names: Names,
        repositories: Repositories,
        *,
        is_only_one: bool = False,
    ) -> None:
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
    ) -> Recorded:
        """Register a repository, or fetch a registered one again. `check` replaces the check that
        `url` is a repository, for one that needs a credential. Raises InvalidConfig for a bad name,
        Refused when `url` is not a repository, and Conflict when the name belongs to another
        repository."""
        if name is not None and not NAME.fullmatch(name):
            message = f"{name!r} cannot name a workspace; use a-z, 0-9, '-' and '_', at most 63"
            raise InvalidConfig(message, issues=(Issue("name", message),))
        url = url.rstrip("/") if len(url) > 1 else url
        await (check or self._repositories.check)(url)
        if self._is_only_one and not await self._is_known(url):
            raise Conflict(f"there is a workspace already; {ONE_WORKSPACE}")
        for candidate in (name,) if name else _candidates(url):
            recorded = await self._request_commit(url, candidate)
            if recorded is not None:
                return recorded
        raise Conflict(
            f"the name {name} is already used by a workspace of another repository; choose another name "
            "with --name"
        )

    async def _is_known(self, url: str) -> bool:
        """Whether there is no workspace yet, or the only one is of this repository."""
        known = await self._names.all_names("workspace")
        found = [await self._find_id(identity) for identity in known.values()]
        return all(one is None or one.url == url for one in found)

    async def _request_commit(self, url: str, name: str) -> Recorded | None:
        """Request the commit under this name. None when the name belongs to another repository."""
        identity = WorkspaceId(short_id("workspace", name))
        requested = CommitRequested(
            workspace=identity, workspace_name=name, commit=CommitSpec(url=url)
        )
        await self._names.take("workspace", name, identity)
        known = await self._log.read(
            identity, after=Cursor(), limit=1, types=[CommitRequested.type]
        )
        [first] = await self._log.append(
            [requested], cause=derive_id(HEADRACE, f"workspace/{name}")
        )
        if not isinstance(first.event, CommitRequested) or first.event.commit.url != url:
            return None
        if known:
            [again] = await self._log.append([requested], cause=uuid4())
            return again
        return first

    async def find_workspace(self, ref: str) -> Workspace:
        """A workspace by name or id. Raises NotFound."""
        found = await self._find_id(await self._names.find_id("workspace", ref) or ref)
        if found is not None and may_see(found.id):
            return found
        known = ", ".join(await self._known_names()) or "none"
        raise NotFound(
            f"there is no workspace {ref!r} (there are: {known}); `headrace workspace add PATH` adds one"
        )

    async def _known_names(self) -> Mapping[str, str]:
        """The names and ids of the workspaces that this task may see."""
        known = await self._names.all_names("workspace")
        return {name: identity for name, identity in known.items() if may_see(identity)}

    async def _find_id(self, identity: str) -> Workspace | None:
        """The workspace of an id, or None. A workspace that was just added is not below the horizon
        yet, so its stream itself is read when the index does not have it."""
        types = [CommitRequested.type]
        found = await self._log.read(identity, after=Cursor(), limit=1, types=types)
        if not found:
            stream = workspace_stream(identity)
            found = (await self._log.load({stream: 0}, limit=1))[stream]
        for recorded in found:
            if isinstance(recorded.event, CommitRequested):
                event = recorded.event
                return Workspace(
                    WorkspaceId(event.workspace), event.workspace_name, event.commit.url
                )
        return None

    async def find_url(self, url: str, name: str | None = None) -> Workspace | None:
        """The workspace of a URL, or None: that of the name if one is given, else the one that `add`
        would fetch again, else the first one of that URL under another name."""
        url = url.rstrip("/") if len(url) > 1 else url
        others = () if name else await self._names.all_names("workspace")
        for candidate in (name,) if name else dict.fromkeys((*_candidates(url), *others)):
            identity = await self._names.find_id("workspace", candidate)
            found = None if identity is None else await self._find_id(identity)
            if found is not None and found.url == url:
                return found
        return None

    async def all_workspaces(self) -> Sequence[Workspace]:
        """All workspaces, by name."""
        known = await self._names.all_names("workspace")
        found = [await self._find_id(known[name]) for name in sorted(known)]
        return [one for one in found if one is not None]

    async def choose(self, ref: str | None) -> Workspace:
        """The named workspace, or the only one. Raises NotFound, InvalidConfig."""
        if ref is not None:
            return await self.find_workspace(ref)
        known = await self._known_names()
        if not known:
            raise NotFound("there is no workspace yet; `headrace workspace add PATH` adds one")
        if len(known) > 1:
            several = ", ".join(known)
            message = f"is not given, and there are several; name one of: {several} (--workspace)"
            raise InvalidConfig(f"workspace {message}", issues=(Issue("workspace", message),))
        return await self.find_workspace(next(iter(known)))


def _candidates(url: str) -> tuple[str, str]:
    """Names for a repository without a name: its own name, or that name with a digest."""
    last = url.rstrip("/").rpartition("/")[2].rpartition(":")[2].removesuffix(".git").lower()
    base = re.sub(r"[^a-z0-9_-]+", "-", last).strip("-_")[:50] or "workspace"
    return base, f"{base}-{short_id('url', url)[:6]}"
