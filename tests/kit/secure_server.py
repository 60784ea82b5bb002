"""An HTTPS server on this machine, with a certificate that signs itself."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.stack.certificate import make_certificate


class Secure:
    """Answers every request, and counts them. `address` is host:port, and `trusting` verifies it."""

    def __init__(self, directory: Path) -> None:
        files = make_certificate(directory)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(files.certificate, files.key)
        self.trusting = ssl.create_default_context(cafile=str(files.certificate))
        self.num = 0
        self.address = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.num += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello")
        writer.close()


@asynccontextmanager
async def serving(directory: Path, *, host: str = "127.0.0.1") -> AsyncIterator[Secure]:
    """A server on a free port. Its certificate is for 127.0.0.1."""
    made = Secure(directory)
    server = await asyncio.start_server(made.answer, host, 0, ssl=made.context)
    made.address = f"{host}:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
