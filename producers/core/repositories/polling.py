"""Polls the connected repositories, so that a push is found even if no webhook tells of it.

Each repository is asked for its refs every `every_s` seconds, a little earlier or later, so that the
questions spread. All are asked at once at the start. A host gets one question at a time. While it does
not answer, it is asked less and less often. A poll records nothing itself: when the refs differ from
those that sync knows, it appends a request, and sync lists them.
"""

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit
from uuid import uuid4

from infra.ports.services import RefList
from infra.rate_limited_log import RateLimit
from infra.readmodel.deliveries import KnownRefs
from infra.spine.ports.clock import Clock
from infra.spine.ports.event_log import EventStore
from infra.spine.postgres.advisory_lock import lead
from infra.task_cancellation import TaskGroup
from schemas.errors import HeadraceError, Refused, RepositoryAway, TransientError
from schemas.events import RefsCheckRequested

logger = logging.getLogger(__name__)
logger.addFilter(RateLimit())

LOCK = 0x504F4C4C
"""The advisory lock of the control process that polls ("POLL")."""

LOOK_EVERY_S = 1.0
"""How often connections are read, so that a new one is asked soon."""

JITTER = 0.1
"""A question comes up to this part of `every_s` earlier or later."""

LONGEST_PAUSE_S = 600.0
"""The longest pause before a host that does not answer is asked again."""

UNKNOWN = KnownRefs(digest=None, error=None)


class Connected(Protocol):
    """A connected repository (`infra.repositories.forge_connections.ForgeConnection`)."""

    @property
    def workspace(self) -> str: ...
    @property
    def url(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RefSources:
    """The functions that a poll calls: one lists the connected repositories, one asks a repository for
    its refs, one returns the refs that sync knows of some workspaces."""

    connections: Callable[[], Awaitable[Sequence[Connected]]]
    list_refs: Callable[[str, str], Awaitable[RefList]]
    known_refs: Callable[[Sequence[str]], Awaitable[Mapping[str, KnownRefs]]]


@dataclass(slots=True)
class Host:
    """A host of repositories: whether it is being asked, how often it failed in a row, and until when
    it is left alone."""

    busy: bool = False
    failures: int = 0
    pause_until_s: float = -math.inf


@dataclass(slots=True)
class Ages:
    """When each repository was last asked with success, in seconds of the clock."""

    clock: Clock
    _polled: dict[str, float] = field(default_factory=dict)

    def note(self, workspace: str) -> None:
        """Record a successful poll."""
        self._polled[workspace] = self.clock.elapsed_s()

    def keep(self, workspaces: Sequence[str]) -> None:
        """Forget the workspaces that are not connected any more."""
        self._polled = {w: self._polled[w] for w in workspaces if w in self._polled}

    def seconds(self) -> Mapping[str, float]:
        """The age of the last successful poll, by workspace id."""
        now = self.clock.elapsed_s()
        return {workspace: round(now - at, 3) for workspace, at in self._polled.items()}


class Poller:
    """Polls all connected repositories until it is cancelled."""

    def __init__(
        self, log: EventStore, sources: RefSources, clock: Clock, ages: Ages, *, every_s: float
    ) -> None:
        self._log = log
        self._sources = sources
        self._clock = clock
        self._ages = ages
        self._every_s = every_s
        self._due: dict[str, float] = {}
        self._hosts: dict[str, Host] = {}
        self._silent: set[str] = set()

    async def run(self) -> None:
        """Poll until cancelled. An error only delays the next look."""
        async with TaskGroup() as asking:
            while True:
                try:
                    for host, connections in (await self._due_by_host()).items():
                        self._hosts[host].busy = True
                        asking.create_task(self._ask_host(host, connections))
                except (HeadraceError, OSError) as error:
                    logger.warning("repositories are polled the next time: %s", error)
                await self._clock.sleep(min(LOOK_EVERY_S, self._every_s))

    async def poll_all(self) -> None:
        """Ask every repository that is due once, and return when all have answered."""
        due = await self._due_by_host()
        await asyncio.gather(*(self._ask_host(host, found) for host, found in due.items()))

    async def _due_by_host(self) -> Mapping[str, list[Connected]]:
        """The repositories that are due, by host, without the hosts that are busy or left alone."""
        now = self._clock.elapsed_s()
        connections = await self._sources.connections()
        names = [connection.workspace for connection in connections]
        self._ages.keep(names)
        self._due = {name: self._due.get(name, now) for name in names}
        self._silent.intersection_update(names)
        found: dict[str, list[Connected]] = {}
        for connection in sorted(connections, key=self._turn):
            host = self._hosts.setdefault(host_of(connection.url), Host())
            if (
                self._due[connection.workspace] <= now
                and not host.busy
                and host.pause_until_s <= now
            ):
                found.setdefault(host_of(connection.url), []).append(connection)
        return found

    def _turn(self, connection: Connected) -> tuple[bool, float]:
        """The order of questions to a host. A repository that did not answer the last time comes last,
        so that it does not keep the others from being asked."""
        return connection.workspace in self._silent, self._due[connection.workspace]

    async def _ask_host(self, name: str, connections: Sequence[Connected]) -> None:
        """Ask one host for these repositories, one after the other."""
        host = self._hosts[name]
        try:
            for connection in connections:
                self._silent.add(connection.workspace)
                await self._ask(connection)
                self._silent.discard(connection.workspace)
                host.failures = 0
        except RepositoryAway as error:
            host.failures += 1
            pause_s = min(LONGEST_PAUSE_S, self._every_s * 2.0 ** min(host.failures - 1, 10))
            host.pause_until_s = self._clock.elapsed_s() + pause_s
            logger.warning("host %s is asked again in %.0f s: %s", name, pause_s, error)
        except (TransientError, OSError) as error:
            logger.warning("the repositories of %s are asked the next time: %s", name, error)
        except Exception:
            # Nobody awaits the outcome of one host, and the others must be asked all the same.
            logger.exception("the repositories of %s could not be asked", name)
        finally:
            host.busy = False

    async def _ask(self, connection: Connected) -> None:
        """Ask one repository, and request a listing by sync if it answers anything new. Raises
        RepositoryAway when its host does not answer."""
        workspace = connection.workspace
        spread = random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - jitter
        self._due[workspace] = self._clock.elapsed_s() + self._every_s * spread
        try:
            listing = await self._sources.list_refs(workspace, connection.url)
        except Refused:
            known = (await self._sources.known_refs([workspace])).get(workspace, UNKNOWN)
            is_new = known.error is None
        else:
            self._ages.note(workspace)
            known = (await self._sources.known_refs([workspace])).get(workspace, UNKNOWN)
            is_new = known.digest != listing.digest or known.error is not None
        if is_new:
            request = RefsCheckRequested(workspace=workspace, reason="poll")
            await self._log.append([request], cause=uuid4())


async def poll_alone(poller: Poller, database_url: str) -> None:
    """Poll until cancelled, while no other control process polls. The others wait until this one has
    ended, or is frozen."""
    while True:
        try:
            await lead(database_url, LOCK, poller.run)
        except TransientError as error:
            logger.warning("polling begins again in %.0f s: %s", LOOK_EVERY_S, error)
            await asyncio.sleep(LOOK_EVERY_S)


def host_of(url: str) -> str:
    """The host of a repository's URL, `git@host:path` included; "" for a path on this machine."""
    if "://" in url:
        return (urlsplit(url).hostname or "").lower()
    before, colon, _ = url.partition(":")
    return before.rpartition("@")[2].lower() if colon and "/" not in before else ""
