"""User code by a sandbox service: what a worker and the control process hold of it.

The service may be killed at any time, or be taken over by the code that it runs. Then open calls raise
TransientError, and the next call reaches a new service. Nothing that it sends is trusted.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from infra.ports.packages import DeclaredPackages, ResolvedPackages
from infra.ports.services import GatewaySockets
from infra.sandbox.calls import CallingUserCode, UserCall
from infra.sandbox.host_messages import CallAnswer, ProtocolError, parse_answer
from infra.sandbox.service.frames import TO_CLIENT, FrameKind, FrameReader
from infra.sandbox.service.messages import (
    DiscoverRequest,
    Hello,
    SnapshotRequest,
    SocketName,
    SocketRequest,
    encode_call,
    parse,
    parse_found,
)
from infra.sandbox.service.peer import Peer
from infra.sandbox.service.streams import Stream, join
from infra.sandbox.service.tls import abort
from infra.settings.sandbox_level import OTHER_LEVEL, TRUSTED
from schemas.artifact_refs import ArtifactRef
from schemas.errors import InvalidConfig, Refused, SandboxAway, TransientError
from schemas.specs import DiscoveredRollout, Entrypoint, PackageEnvironment

logger = logging.getLogger(__name__)

Fetch = Callable[[ArtifactRef], Awaitable[bytes]]
HELLO_S = 60.0
PAUSES = (0.0, 0.1, 0.5, 2.0, 5.0)
"""Seconds before a connection, by how many in a row have failed or were lost soon."""

STEADY_S = 10.0
"""A connection that lasted this long was not lost soon."""

MOST_SOCKETS = 256
NO_ENVIRONMENTS: Mapping[str, PackageEnvironment] = {}
END_S = 25.0


class Service(Protocol):
    """A way to reach a sandbox service. `name` is for messages."""

    name: str

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a new connection. Raises OSError."""
        ...

    async def disconnect(self, *, within_s: float = 0.0) -> None:
        """Give the service this many seconds to end after its connection was closed."""
        ...


@dataclass(slots=True)
class _Wanted:
    """A snapshot that open calls need, and why it could not be read."""

    ref: ArtifactRef
    data: bytes | None = None
    calls: int = 0
    error: Exception | None = None


class SandboxClient(CallingUserCode):
    """`infra.ports.services.UserCode` by a sandbox service. `fetch` reads snapshots. `sockets` are the
    gateway's, if this process has one. `level` is the one of this process's settings, and a service
    that trusts user code must have the same. None is any level."""

    def __init__(
        self,
        service: Service,
        *,
        fetch: Fetch,
        sockets: GatewaySockets | None = None,
        level: str | None = None,
    ) -> None:
        self._service = service
        self._level = level
        self._fetch = fetch
        self._sockets = sockets
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None
        self._failures = 0
        self._wanted: dict[str, _Wanted] = {}
        self._allowed: Counter[tuple[str, tuple[str, ...]]] = Counter()

    async def start(self) -> None:
        """Start the service, or connect to it. Raises InvalidConfig when it cannot confine user code. If
        it cannot be reached now, calls wait for it."""
        try:
            await self._connect()
        except SandboxAway as error:
            logger.warning("user code waits: %s", error)

    async def make_call(self, call: UserCall) -> CallAnswer:
        """Make one attempt at a call. Raises the errors of the service, and TransientError when it
        ends."""
        parts = encode_call(call)
        refs = [(call.rollout.snapshot, None), *_locks([call.rollout.environment])]
        allowed = (call.owner.run, call.rollout.network)
        self._allowed[allowed] += 1
        try:
            data = await self._request(refs, FrameKind.CALL, *parts)
        finally:
            self._allowed[allowed] -= 1
            self._allowed += Counter()  # without those that have no calls
        try:
            answer = parse_answer(call.role, data)
        except ProtocolError:
            answer = None
        if answer is None or answer.id != call.name:
            self._distrust("it sent an answer that is not one")
            raise TransientError(f"{self._service.name} sent an invalid answer")
        return answer

    async def resolve(self, declared: DeclaredPackages) -> ResolvedPackages:
        """Choose the exact versions of packages. Raises Refused, and TransientError when the service
        ends."""
        payload = declared.model_dump_json().encode()
        data = await self._request((), FrameKind.RESOLVE, payload)
        try:
            return parse(ResolvedPackages, data)
        except ProtocolError as error:
            self._distrust(str(error))
            raise TransientError(f"{self._service.name} sent an invalid answer") from error

    async def discover(
        self,
        snapshot: bytes,
        entrypoints: Sequence[Entrypoint],
        *,
        environments: Mapping[str, PackageEnvironment] = NO_ENVIRONMENTS,
    ) -> tuple[DiscoveredRollout, ...]:
        sha256 = await asyncio.to_thread(lambda: hashlib.sha256(snapshot).hexdigest())
        ref = ArtifactRef(uri="memory:", sha256=sha256, size=len(snapshot))
        request = DiscoverRequest(
            sha256=sha256,
            size=len(snapshot),
            entrypoints=tuple(entrypoints),
            environments=dict(environments),
        )
        payload = request.model_dump_json().encode()
        try:
            refs = [(ref, snapshot), *_locks(environments.values())]
            data = await self._request(refs, FrameKind.DISCOVER, payload)
            found = parse_found(data)
            if entrypoints and not {one.entrypoint for one in found} <= set(entrypoints):
                raise ProtocolError("it examined other entry points")
        except ProtocolError as error:
            self._distrust(str(error))
            raise TransientError(f"{self._service.name} sent an invalid answer") from error
        return tuple(
            one.model_copy(update={"environment": environments.get(one.entrypoint.rollout)})
            for one in found
        )

    async def aclose(self) -> None:
        """End the service's part of us: all our user code."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose("closed")
        await self._service.disconnect(within_s=END_S)

    async def _request(
        self, refs: Sequence[tuple[ArtifactRef, bytes | None]], kind: FrameKind, *parts: bytes
    ) -> bytes:
        """Make a request that needs artifacts, some of which are here already, and return its
        answer."""
        try:
            peer = (await self._connect()).peer
        except InvalidConfig as error:  # it could when this process started
            raise SandboxAway(error.message) from error
        held = [self._want(ref, data) for ref, data in refs]
        try:
            return await peer.request(kind, *parts)
        except TransientError as error:
            for wanted in held:
                if wanted.error is not None:
                    raise wanted.error from error
            raise
        finally:
            for wanted in held:
                wanted.calls -= 1
                if not wanted.calls:
                    self._wanted.pop(wanted.ref.sha256, None)

    def _want(self, ref: ArtifactRef, data: bytes | None) -> _Wanted:
        wanted = self._wanted.setdefault(ref.sha256, _Wanted(ref, data))
        wanted.data = wanted.data if data is None else data
        wanted.calls += 1
        return wanted

    async def _connect(self) -> "_Connection":
        """The open connection, or a new one. Callers that wait for the same one get the same error."""
        connection = self._connection
        if connection is not None and not connection.peer.lost.is_set():
            return connection
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.ensure_future(self._replace(connection))
        return await asyncio.shield(self._connecting)

    async def _replace(self, former: "_Connection | None") -> "_Connection":
        """Connect again. Raises InvalidConfig when the service cannot confine user code, and SandboxAway
        when it cannot be reached."""
        if former is not None:
            self._failures = 1 if former.was_steady else self._failures + 1
            logger.warning("%s is lost: %s", self._service.name, former.peer.why)
            self._connection = None
            await former.aclose("lost")
        await asyncio.sleep(PAUSES[min(self._failures, len(PAUSES) - 1)])
        try:
            self._connection = await self._open()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ProtocolError) as error:
            self._failures += 1
            why = str(error) or "it does not answer"
            raise SandboxAway(f"{self._service.name} cannot be reached: {why}") from error
        return self._connection

    async def _open(self) -> "_Connection":
        reader, writer = await self._service.connect()
        frames = FrameReader(reader, TO_CLIENT)
        try:
            async with asyncio.timeout(HELLO_S):
                kind, _, payload = await frames.read()
            if kind is not FrameKind.HELLO:
                raise ProtocolError("it did not say hello")
            hello = parse(Hello, payload)
        except BaseException:
            abort(writer)
            raise
        if hello.refused is not None:
            abort(writer)
            raise InvalidConfig(hello.refused)
        if hello.is_trusting and self._level not in (None, TRUSTED):
            abort(writer)
            raise InvalidConfig(f"{self._service.name}: {OTHER_LEVEL}")
        return _Connection(frames, writer, self._sockets, self)

    def _distrust(self, why: str) -> None:
        if self._connection is not None:
            self._connection.peer.drop(why)

    def may_connect(self, run: str, network: tuple[str, ...]) -> bool:
        """Whether an open call belongs to this run and has this network."""
        return self._allowed[run, network] > 0

    async def snapshot(self, sha256: str) -> bytes:
        """The bytes of a snapshot that an open call needs. Raises Refused for another one, and the
        error of reading it."""
        wanted = self._wanted.get(sha256)
        if wanted is None:
            raise Refused("no open call needs this snapshot")
        if wanted.data is not None:
            return wanted.data
        try:
            return await self._fetch(wanted.ref)
        except Exception as error:  # the call that needs it raises it
            wanted.error = error
            raise


def _locks(
    environments: Iterable[PackageEnvironment | None],
) -> list[tuple[ArtifactRef, bytes | None]]:
    """The pins of environments, which the service may need."""
    return [(each.lock, None) for each in environments if each is not None]


class _Connection:
    """One connection to a service, and the sockets that were opened for it."""

    def __init__(
        self,
        frames: FrameReader,
        writer: asyncio.StreamWriter,
        sockets: GatewaySockets | None,
        client: SandboxClient,
    ) -> None:
        self._client = client
        self._sockets = sockets
        self._paths: set[Path] = set()
        self._began = asyncio.get_running_loop().time()
        self.peer = Peer(
            frames,
            writer,
            answers={
                FrameKind.OPEN_SOCKET: self._open_socket,
                FrameKind.CLOSE_SOCKET: self._close_socket,
            },
            carriers={
                FrameKind.SNAPSHOT: self._send_snapshot,
                FrameKind.CONNECT: self._join_socket,
            },
        )
        self._running = asyncio.ensure_future(self.peer.run())

    @property
    def was_steady(self) -> bool:
        return asyncio.get_running_loop().time() - self._began >= STEADY_S

    async def aclose(self, why: str) -> None:
        self.peer.drop(why)
        await asyncio.gather(self._running, return_exceptions=True)
        for path in tuple(self._paths):
            await self._close(path)

    async def _open_socket(self, payload: bytes) -> bytes:
        request = parse(SocketRequest, payload)
        if self._sockets is None or not self._client.may_connect(request.run, request.network):
            raise Refused("no open call of this run may use such a socket")
        if len(self._paths) >= MOST_SOCKETS:
            raise Refused(f"at most {MOST_SOCKETS} sockets may be open")
        path = await self._sockets.open_socket(request.run, network=request.network)
        self._paths.add(path)
        return SocketName(socket=str(path)).model_dump_json().encode()

    async def _close_socket(self, payload: bytes) -> bytes:
        path = Path(parse(SocketName, payload).socket)
        if path in self._paths:
            await self._close(path)
        return b"{}"

    async def _close(self, path: Path) -> None:
        self._paths.discard(path)
        if self._sockets is not None:
            await self._sockets.close_socket(path)

    async def _send_snapshot(self, stream: Stream, payload: bytes) -> None:
        data = await self._client.snapshot(parse(SnapshotRequest, payload).sha256)
        await stream.send(data)
        stream.end()

    async def _join_socket(self, stream: Stream, payload: bytes) -> None:
        path = Path(parse(SocketName, payload).socket)
        if path not in self._paths:
            raise Refused("this socket is not open")
        reader, writer = await asyncio.open_unix_connection(path)
        await join(stream, reader, writer)
