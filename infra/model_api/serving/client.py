"""Forwards requests of clients from the control process to a process that serves."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

from infra.model_api.serving.call import ServingCall
from infra.model_api.serving.grants import GRANT_S, ServingAddress, ServingDoors
from schemas.errors import TransientError

ADDRESSES_S = 1.0
"""For how long the addresses of the processes are remembered."""
CONNECT_S = 2.0
SILENT_S = 1800.0
"""How long an answer may take. A stream says every few seconds that it is alive."""
LIMITS = httpx.Limits(max_connections=1024, max_keepalive_connections=256, keepalive_expiry=60)

AWAY = "the process that serves deployments does not answer now; try again"


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """The beginning of an answer. The caller must read `chunks` to the end, or call `aclose`."""

    status: int
    content_type: str
    chunks: AsyncIterator[bytes]
    response: httpx.Response

    async def aclose(self) -> None:
        """Let go of the answer. If it is not over, its sampling ends."""
        await self.response.aclose()


class ServingClient:
    """Asks the processes that serve, in turns."""

    def __init__(self, doors: ServingDoors) -> None:
        self._doors = doors
        self._client: httpx.AsyncClient | None = None
        self._known: list[ServingAddress] = []
        self._known_at = float("-inf")
        self._keys: dict[str, tuple[str, float]] = {}
        self._granting = asyncio.Lock()
        self._turns = itertools.count()

    async def ask(self, call: ServingCall, body: bytes) -> ServedAnswer:
        """Forward a request. Returns when the answer begins. Raises TransientError when no process
        answers. A request that a process may have begun is not sent again."""
        servers = await self._servers()
        if not servers:
            raise TransientError(
                "no process serves deployments now; try again, and see `headrace status` if this lasts"
            )
        first = next(self._turns) % len(servers)
        head = call.pack(b"")
        for server in (*servers[first:], *servers[:first]):
            try:
                return await self._ask(server, head, body)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                self._known_at = float("-inf")
            except httpx.TransportError as error:
                self._known_at = float("-inf")
                raise TransientError(AWAY) from error
        raise TransientError(AWAY)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _ask(self, server: ServingAddress, head: bytes, body: bytes) -> ServedAnswer:
        client = self._open_client()
        key = await self._key_for(server)
        request = client.build_request(
            "POST",
            server.url,
            content=_pieces(head, body),
            headers={
                "Authorization": f"Bearer {key}",
                "Content-Type": "application/octet-stream",
                "Content-Length": str(len(head) + len(body)),
            },
        )
        response = await client.send(request, stream=True)
        if response.status_code == 401:  # the database was replaced, or the key has just expired
            self._keys.pop(server.worker, None)
            await response.aclose()
            raise TransientError(AWAY)
        kind = response.headers.get("content-type", "application/json")
        return ServedAnswer(response.status_code, kind, response.aiter_raw(), response)

    def _open_client(self) -> httpx.AsyncClient:
        if self._client is None:
            timeout = httpx.Timeout(SILENT_S, connect=CONNECT_S)
            self._client = httpx.AsyncClient(timeout=timeout, limits=LIMITS, trust_env=False)
        return self._client

    async def _servers(self) -> list[ServingAddress]:
        now = time.monotonic()
        if now - self._known_at >= ADDRESSES_S or not self._known:
            self._known = await self._doors.find_addresses()
            self._known_at = now
        return self._known

    async def _key_for(self, server: ServingAddress) -> str:
        """A key for a process, made once and renewed in time."""
        now = time.monotonic()
        key, until = self._keys.get(server.worker, ("", 0.0))
        if now < until:
            return key
        async with self._granting:
            key, until = self._keys.get(server.worker, ("", 0.0))
            if now >= until:
                key = await self._doors.grant(server.worker)
                self._keys = {w: held for w, held in self._keys.items() if held[1] > now}
                self._keys[server.worker] = (key, now + GRANT_S / 2)
        return key


async def _pieces(head: bytes, body: bytes) -> AsyncIterator[bytes]:
    """A request in two pieces, so that its body is not copied. An answer keeps its request, but once it
    was sent, nothing of its bytes."""
    yield head
    yield body
