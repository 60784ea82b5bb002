"""The webhooks that exist: the forge and the valid secrets of each connected workspace.

A lookup is remembered for at most a second, so a burst of deliveries costs few queries, and a rotated
or withdrawn secret takes effect within that second. Unknown names are remembered like known ones.
"""

import asyncio
import logging
import re
from dataclasses import dataclass, field
from typing import Protocol

from infra.names import Names
from infra.ports.actor import MAIN
from infra.rate_limited_log import RateLimit
from infra.repositories.forge_connections import ForgeConnections
from schemas.errors import Refused
from schemas.events import ForgeKind
from schemas.ids import WorkspaceId, is_id

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())

REF = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
"""The form of the names and ids of workspaces."""

KEPT_S = 1.0
MOST_KEPT = 4096
AT_ONCE = 4
"""How many lookups ask the database at the same time, so that guessed names leave it to others."""


@dataclass(frozen=True, slots=True)
class Hook:
    """The webhook of a workspace. `secrets` are those that are valid now."""

    workspace: WorkspaceId
    forge: ForgeKind
    secrets: tuple[str, ...] = field(repr=False)


class HookSource(Protocol):
    async def find_hook(self, ref: str) -> Hook | None:
        """Return the webhook of a workspace (name or id), or None."""
        ...


class ConnectedHooks:
    """`HookSource` from the connections in the database."""

    def __init__(self, names: Names, connections: ForgeConnections) -> None:
        self._names = names
        self._connections = connections

    async def find_hook(self, ref: str) -> Hook | None:
        identity = ref
        try:
            # An id comes first, so that nobody takes the deliveries of another workspace with a name.
            found = await self._connections.get_connection(ref) if is_id(ref) else None
            if found is None:
                identity = await self._workspace_id(ref)
                found = await self._connections.get_connection(identity)
        except Refused as error:  # a secret that does not open: the sender learns nothing of it
            logger.error("the webhook of workspace %s is off: %s", identity, error.message)
            return None
        if found is None or not found.secrets:
            return None
        return Hook(WorkspaceId(found.workspace), found.forge, found.secrets)

    async def _workspace_id(self, ref: str) -> str:
        """The workspace (id) that the path of a webhook names. Names stand for workspaces of `main`, and
        for those from before there were organisations. The paths of others hold ids."""
        for scope in (MAIN, ""):
            if found := await self._names.find_id("workspace", ref, scope=scope):
                return found
        return ref


class RecentHooks:
    """`HookSource` that remembers what another one found, for `kept_s` seconds."""

    def __init__(self, source: HookSource, *, kept_s: float = KEPT_S) -> None:
        self._source = source
        self._kept_s = kept_s
        self._found: dict[str, tuple[float, Hook | None]] = {}
        self._asked: dict[str, asyncio.Task[Hook | None]] = {}
        self._free = asyncio.Semaphore(AT_ONCE)

    async def find_hook(self, ref: str) -> Hook | None:
        if not REF.fullmatch(ref):
            return None
        loop = asyncio.get_running_loop()
        until, hook = self._found.get(ref, (0.0, None))
        if loop.time() < until:
            return hook
        if ref not in self._asked:
            self._asked[ref] = loop.create_task(self._ask(ref))
        return await asyncio.shield(self._asked[ref])

    async def _ask(self, ref: str) -> Hook | None:
        loop = asyncio.get_running_loop()
        try:
            async with self._free:
                asked_at = loop.time()
                hook = await self._source.find_hook(ref)
            self._found.pop(ref, None)
            while len(self._found) >= MOST_KEPT:
                del self._found[next(iter(self._found))]
            self._found[ref] = (asked_at + self._kept_s, hook)
            return hook
        finally:
            del self._asked[ref]
