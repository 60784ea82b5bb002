"""Chooses how this process reaches a sandbox service: as a child of its own, or at an address of the
operator's network."""

import asyncio

from infra.sandbox.service.child import ChildService
from infra.sandbox.service.client import Service
from infra.sandbox.service.handshake import greet_service
from infra.sandbox.service.listener import READ_AHEAD, keep_alive
from infra.settings.settings import Settings

CONNECT_S = 10.0


class RemoteService:
    """A way to reach a service: by TCP, with a key that both ends have."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self.name = f"the sandbox service at {host}:{port}"
        self._host, self._port, self._key = host, port, key

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect. Raises OSError, also when the service has another key."""
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=READ_AHEAD)
        keep_alive(writer)
        try:
            await greet_service(reader, writer, self._key)
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    async def disconnect(self, *, within_s: float = 0.0) -> None:
        """Do nothing: the service ends the user code of a connection that is closed."""


def service_of(settings: Settings) -> Service:
    """Return the way to the service that HEADRACE_SANDBOX_URL names, or to a child of this process."""
    address = settings.sandbox_service
    if address is None:
        return ChildService(settings.sandbox, environments=settings.packages.directory)
    return RemoteService(address.host, address.port, address.key)
