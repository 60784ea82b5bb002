"""Chooses how this process reaches a sandbox service: as a child of its own, or at an address of the
operator's network."""

import asyncio
import ssl

from infra.sandbox.service.child import ChildService
from infra.sandbox.service.client import Service
from infra.sandbox.service.listener import READ_AHEAD, keep_alive
from infra.sandbox.service.tls import abort, greet_service, make_context
from infra.settings.settings import Settings
from schemas.errors import InvalidConfig

CONNECT_S = 10.0


class RemoteService:
    """A way to reach a service: by TLS over TCP."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext) -> None:
        self.name = f"the sandbox service at {host}:{port}"
        self._host, self._port, self._context = host, port, context

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect. Raises OSError, also when one end refuses the other's certificate."""
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=READ_AHEAD)
        keep_alive(writer)
        try:
            await greet_service(reader, writer, self._context)
        except BaseException:
            abort(writer)
            raise
        return reader, writer

    async def disconnect(self, *, within_s: float = 0.0) -> None:
        """Do nothing: the service ends the user code of a connection that is closed."""


def service_of(settings: Settings) -> Service:
    """Return the way to the service that HEADRACE_SANDBOX_URL names, or to a child of this process.
    Raises InvalidConfig when our certificates cannot be used."""
    address = settings.sandbox_service
    if address is None:
        return ChildService(settings.sandbox, environments=settings.packages.directory)
    try:
        context = make_context(address.certificates, is_service=False)
    except ValueError as error:
        raise InvalidConfig(str(error)) from error
    return RemoteService(address.host, address.port, context)
