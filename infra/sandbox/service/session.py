"""The service's side of one connection: it runs the user code of one client, and ends all of it when the
connection is over."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from infra.ports.packages import DeclaredPackages
from infra.ports.services import GatewaySockets
from infra.sandbox.sandbox import LocalUserCode
from infra.sandbox.service.frames import TO_SERVICE, FrameKind, FrameReader
from infra.sandbox.service.messages import (
    DiscoverRequest,
    Hello,
    encode_found,
    parse,
    parse_call,
)
from infra.sandbox.service.peer import Peer
from infra.sandbox.service.snapshots import SnapshotCache
from infra.settings.sandbox_level import TRUSTED
from schemas.artifact_refs import ArtifactRef
from schemas.errors import InvalidConfig

CLOSE_S = 20.0
"""How long user code may take to end after its connection."""


class ClosableSockets(GatewaySockets, Protocol):
    """Sockets that can all be closed."""

    async def aclose(self) -> None:
        """Close all sockets."""
        ...


class ServiceSession:
    """Serves one client. `level` says how its user code is confined."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        level: str,
        snapshots: SnapshotCache,
        make_sockets: Callable[[Peer], ClosableSockets],
    ) -> None:
        self._writer = writer
        self._level = level
        self._snapshots = snapshots
        self._peer = Peer(
            FrameReader(reader, TO_SERVICE),
            writer,
            answers={
                FrameKind.CALL: self._call,
                FrameKind.DISCOVER: self._discover,
                FrameKind.RESOLVE: self._resolve,
            },
        )
        self._sockets = make_sockets(self._peer)
        self._code: LocalUserCode | None = None

    async def serve(self) -> None:
        """Serve until the connection is over. Everything that the client started has ended then."""
        hello = Hello(is_trusting=self._level == TRUSTED)
        try:
            self._code = LocalUserCode(self._level, fetch=self._fetch, sockets=self._sockets)
        except InvalidConfig as error:
            hello = Hello(refused=error.message)
        self._peer.send(FrameKind.HELLO, 0, hello.model_dump_json(exclude_defaults=True).encode())
        try:
            if self._code is None:
                self._writer.close()
                with contextlib.suppress(ConnectionError):
                    await self._writer.wait_closed()
                return
            await self._peer.run()
        finally:
            try:
                async with asyncio.timeout(CLOSE_S):
                    if self._code is not None:
                        await self._code.aclose()
            finally:
                await self._sockets.aclose()

    async def _fetch(self, ref: ArtifactRef) -> bytes:
        return await self._snapshots.get_snapshot(ref.sha256, ref.size, peer=self._peer)

    async def _call(self, payload: bytes) -> bytes:
        answer = await self._user_code.make_call(parse_call(payload))
        return answer.model_dump_json().encode()

    async def _discover(self, payload: bytes) -> bytes:
        request = parse(DiscoverRequest, payload)
        snapshot = await self._snapshots.get_snapshot(request.sha256, request.size, peer=self._peer)
        found = await self._user_code.discover(
            snapshot, request.entrypoints, environments=request.environments
        )
        return encode_found(found)

    async def _resolve(self, payload: bytes) -> bytes:
        resolved = await self._user_code.resolve(parse(DeclaredPackages, payload))
        return resolved.model_dump_json().encode()

    @property
    def _user_code(self) -> LocalUserCode:
        assert self._code is not None  # noqa: S101 - frames are read only with it
        return self._code
