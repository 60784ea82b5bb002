"""Connecting a workspace to the forge of its repository: the credential, the webhook and its secret.

The refs of a new connection are remembered before its webhook is made, so that the next push counts and
earlier ones do not. A webhook that the forge's API does not make can be made by hand. Secrets go to the
table of connections, and into no event.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from uuid import UUID

from infra.ports.actor import MAIN
from infra.repositories.forge_connections import ForgeConnection, ForgeConnections
from infra.repositories.forges.address import guess_forge, is_local
from infra.repositories.forges.api import ForgeApis
from infra.repositories.forges.forge import PushHook
from infra.repositories.git.credentials import AppCredential, Credential, GitCredential
from infra.spine.ports.clock import Clock
from infra.spine.ports.event_log import Cursor, EventStore
from producers.core.workspaces import NAME, Workspace, Workspaces, check_address
from schemas.errors import ForgeAway, InvalidConfig, Issue, NotFound, Refused
from schemas.events import (
    ForgeKind,
    RefsCheckRequested,
    RefsListed,
    WorkspaceConnected,
    WorkspaceDisconnected,
)
from schemas.ids import workspace_stream

logger = logging.getLogger(__name__)

CheckRepository = Callable[[str, GitCredential | None], Awaitable[str]]
"""Raises Refused when a URL is not a repository that the credential opens."""

LISTED_S = 20.0
"""How long a connection waits until the refs of its repository are remembered."""

LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class ConnectRequest:
    """A request to connect a repository: its URL or directory, or the name of a workspace.
    `organisation` (id) is whose workspace it is; without one, the sender's."""

    url: str
    name: str | None = None
    forge: ForgeKind | None = None
    credential: Credential | None = field(default=None, repr=False)
    organisation: str | None = None


@dataclass(frozen=True, slots=True)
class HookState:
    """The webhook of a connection. `secret` is None where it did not change. `made` says whether the
    forge has the webhook; if not, `problem` says why, or is None when there is no API to ask."""

    url: str
    secret: str | None = field(repr=False)
    made: bool = False
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Connecting:
    """Connects workspaces to forges, and disconnects them."""

    log: EventStore
    workspaces: Workspaces
    connections: ForgeConnections
    forges: ForgeApis
    check: CheckRepository
    public_url: str
    clock: Clock

    async def connect(
        self, request: ConnectRequest, *, cause: UUID
    ) -> tuple[Workspace, ForgeKind, HookState]:
        """Connect a workspace, which is added if it is new, or change its connection. Raises Refused
        when the repository cannot be opened with the credential, and ForgeAway when its forge does not
        answer."""
        known = await self._find_known(request)
        if known is None:
            check_address(request.url)
        url = known.url if known else request.url
        forge = _forge_kind(request.forge, url)
        before = await self._readable(known.id) if known else None
        if before is not None and (before.url, before.forge) != (url, forge):
            before = None
        is_new = known is None or before is None or not await self._is_complete(known)
        credential = request.credential or (before.credential if before else None)
        await self._try(ForgeConnection("", forge, url, credential=credential))
        workspace = known or await self._add(request, credential, forge)
        connection = await self.connections.put_connection(
            workspace.id, forge=forge, url=workspace.url, credential=request.credential
        )
        if is_new:
            await self._remember_refs(workspace, cause)
        hook = await self._make_hook(workspace, connection)
        connected = WorkspaceConnected(
            workspace=workspace.id,
            forge=forge,
            hook=hook.id,
            can_post=self.forges.open(connection) is not None,
        )
        is_repeat = await self._append_once(connected, cause)
        secret = connection.secrets[0] if is_new or is_repeat else None
        return workspace, forge, self._state(workspace, secret, hook)

    async def disconnect(self, ref: str, *, cause: UUID) -> tuple[Workspace, bool, str | None]:
        """Delete the webhook and the connection of a workspace, with its secrets. Returns
        whether the forge had a webhook that was deleted, and why it could not be asked, or None. Raises
        NotFound when it is not connected."""
        workspace = await self.workspaces.find_workspace(ref)
        connection = await self._known_connection(workspace)
        deleted, problem = False, None
        try:
            forge = None if connection is None else self.forges.open(connection)
            deleted = forge is not None and await forge.delete_hook(self._hook_url(workspace))
        except (Refused, ForgeAway) as error:
            problem = str(error)
        await self.connections.drop(workspace.id)
        await self.log.append([WorkspaceDisconnected(workspace=workspace.id)], cause=cause)
        return workspace, deleted, problem

    async def rotate(self, ref: str, *, now: bool) -> tuple[Workspace, ForgeKind, HookState]:
        """Give the webhook a new secret. The one before stays valid for a day, or with `now` not at
        all. Raises NotFound when the workspace is not connected."""
        workspace = await self.workspaces.find_workspace(ref)
        connection = await self.connections.rotate(workspace.id, now=now)
        if connection is None:
            raise NotFound(_not_connected(workspace))
        hook = await self._make_hook(workspace, connection)
        return workspace, connection.forge, self._state(workspace, connection.secrets[0], hook)

    async def _find_known(self, request: ConnectRequest) -> Workspace | None:
        """The workspace of a URL, or the one whose name the request holds in place of a URL."""
        if NAME.fullmatch(request.url) and request.name is None:
            return await self.workspaces.find_workspace(
                request.url, organisation=request.organisation
            )
        return await self.workspaces.find_url(
            request.url, request.name, organisation=request.organisation
        )

    async def _is_complete(self, workspace: Workspace) -> bool:
        """Whether the connection that is stored was completed. One that was cut off before its event has
        no baseline, and its secret was never shown. The stream itself is read, because the index does
        not have an event above the horizon."""
        stream = workspace_stream(workspace.id)
        recorded = (await self.log.load({stream: 0}))[stream]
        kinds = (WorkspaceConnected, WorkspaceDisconnected)
        changes = [one.event for one in recorded if isinstance(one.event, kinds)]
        return bool(changes) and isinstance(changes[-1], WorkspaceConnected)

    async def _append_once(self, event: WorkspaceConnected, cause: UUID) -> bool:
        """Append the event. Returns whether this cause appended it before: then the client repeats a
        request whose answer it did not get."""
        version = (await self.log.versions([event.stream]))[event.stream]
        [recorded] = await self.log.append([event], cause=cause)
        return recorded.version <= version

    async def _try(self, connection: ForgeConnection) -> None:
        """Ask the forge and the repository with the credential, before anything is stored."""
        forge = self.forges.open(connection)
        if forge is None and isinstance(connection.credential, AppCredential):
            raise InvalidConfig("a GitHub App needs a repository on GitHub; use --forge github")
        if forge is not None:
            await forge.check()
        await self.check(connection.url, await self.forges.git_credential(connection))

    async def _add(
        self, request: ConnectRequest, credential: Credential | None, forge: ForgeKind
    ) -> Workspace:
        connection = ForgeConnection("", forge, request.url, credential=credential)
        opened = await self.forges.git_credential(connection)

        async def check(url: str) -> str:
            return await self.check(url, opened)

        recorded = await self.workspaces.add(
            request.url, request.name, check=check, organisation=request.organisation
        )
        return await self.workspaces.find_workspace(recorded.event.run_id)

    async def _readable(self, workspace: str) -> ForgeConnection | None:
        """The connection of a workspace. One that does not open with this process's key is dropped,
        because connecting again is what its error advises."""
        try:
            return await self.connections.get_connection(workspace)
        except InvalidConfig as error:
            logger.warning("the connection of %s is made again: %s", workspace, error)
            await self.connections.drop(workspace)
            return None

    async def _known_connection(self, workspace: Workspace) -> ForgeConnection | None:
        """The connection, or None for one that this process's key does not open. Raises NotFound when
        there is none."""
        try:
            found = await self.connections.get_connection(workspace.id)
        except InvalidConfig:
            return None
        if found is None:
            raise NotFound(_not_connected(workspace))
        return found

    async def _remember_refs(self, workspace: Workspace, cause: UUID) -> None:
        """Ask for a baseline of the refs, and wait until it is recorded. Goes on without it after
        LISTED_S, because sync lists the refs as soon as it can."""
        request = RefsCheckRequested(workspace=workspace.id, reason="connected", baseline=True)
        [recorded] = await self.log.append([request], cause=cause)
        until = self.clock.elapsed_s() + LISTED_S
        while self.clock.elapsed_s() < until:
            if await self._is_listed(workspace, recorded.cursor):
                return
            await self.clock.sleep(LOOK_EVERY_S)
        logger.warning("the refs of workspace %s are not listed yet", workspace.name)

    async def _is_listed(self, workspace: Workspace, after: Cursor) -> bool:
        return bool(
            await self.log.read(workspace.id, after=after, limit=1, types=[RefsListed.type])
        )

    async def _make_hook(self, workspace: Workspace, connection: ForgeConnection) -> "MadeHook":
        """Make the webhook, or give it the newest secret, if there is an API to ask."""
        forge = self.forges.open(connection)
        if forge is None:
            return MadeHook(connection.hook)
        hook = PushHook(self._hook_url(workspace), connection.secrets[0])
        try:
            made = await forge.put_hook(hook)
        except (Refused, ForgeAway) as error:
            return MadeHook(connection.hook, problem=str(error))
        await self.connections.set_hook(workspace.id, made)
        return MadeHook(made, done=True)

    def _state(self, workspace: Workspace, secret: str | None, hook: "MadeHook") -> HookState:
        return HookState(self._hook_url(workspace), secret, hook.done, hook.problem)

    def _hook_url(self, workspace: Workspace) -> str:
        ref = workspace.name if workspace.organisation == MAIN else workspace.id
        return f"{self.public_url}/webhooks/{ref}"


@dataclass(frozen=True, slots=True)
class MadeHook:
    """The forge's id of a webhook, and whether the forge has just taken it; `problem` says why not."""

    id: str | None
    done: bool = False
    problem: str | None = None


def _forge_kind(given: ForgeKind | None, url: str) -> ForgeKind:
    forge = given or guess_forge(url)
    if forge is None:
        message = "cannot be told from this address; name it: github, gitea or gitlab"
        raise InvalidConfig(
            f"the kind of forge {message} (--forge)", issues=(Issue("forge", message),)
        )
    return "none" if is_local(url) and given is None else forge


def _not_connected(workspace: Workspace) -> str:
    return (
        f"workspace {workspace.name} is not connected; connect it with: headrace workspace connect "
        f"{workspace.name}"
    )
