"""TLS 1.3 between a sandbox service and its clients over TCP. Each end shows a certificate of the
operator's authority, which signs nothing else.

A service is known by a fixed name in its certificate, not by its address: it may be reached by several
names, and several services may run behind one. A certificate of a client is of no use as a service.
"""

import asyncio
import contextlib
import os
import ssl

from infra.sandbox.levels.bubblewrap_options import ETC, SYSTEM, memory_file
from infra.settings.sandbox_level import TRUSTED
from infra.settings.sandbox_service import CA, CERT, KEY, SandboxCertificates

SERVICE_NAME = "headrace-sandbox"
"""The name in the certificate of every sandbox service."""

GREETING = b"headrace sandbox 2\n"
"""The first bytes of a service. In TLS 1.3 a client learns only from them that it is accepted."""

HANDSHAKE_S = 5.0
"""How long a whole handshake may take."""


class HandshakeFailed(ConnectionError):
    """The other end has no certificate of our authority, or is something else."""


def abort(writer: asyncio.StreamWriter) -> None:
    """Close a connection at once, or leave it closed. In Python 3.11.2, which Debian 12 has, the TLS
    transport of a closed connection fails instead."""
    with contextlib.suppress(AttributeError):
        writer.transport.abort()


def make_context(certificates: SandboxCertificates, *, is_service: bool) -> ssl.SSLContext:
    """Return what one end expects and shows. Raises ValueError when its certificates cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_service else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if is_service:
        context.num_tickets = 0  # every connection proves its certificate again
    descriptor = memory_file(f"{certificates.certificate}\n{certificates.key}".encode())
    try:
        # an encrypted key has no password here, so it fails; without one OpenSSL would ask a terminal
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
        context.load_verify_locations(cadata=certificates.authority)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{CERT}, {KEY} and {CA} cannot be used together: {_reason(error)}"
        ) from error
    finally:
        os.close(descriptor)
    return context


def check_key_is_hidden(certificates: SandboxCertificates, level: str) -> None:
    """Raise ValueError if the key is in a file that user code of this level can read."""
    path = certificates.key_file
    if path is None:
        return
    is_ours = os.geteuid() == 0 and not path.stat().st_mode & 0o077
    is_shown = any(path.resolve().is_relative_to(shown) for shown in ("/usr", *SYSTEM, *ETC))
    if not is_ours and (is_shown or level == TRUSTED):
        raise ValueError(
            f"{KEY} names the file {path}, which user code of level {level} can read; set {KEY} to the "
            "text of the file instead"
        )


async def admit_client(writer: asyncio.StreamWriter, context: ssl.SSLContext) -> None:
    """Do the service's part of the handshake on a new connection. Raises HandshakeFailed, and
    TimeoutError when it takes too long."""
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await writer.start_tls(context)
            writer.write(GREETING)
            await writer.drain()
    except OSError as error:
        raise HandshakeFailed(_reason(error)) from error


async def greet_service(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext
) -> None:
    """Do the client's part of the handshake. Raises HandshakeFailed, and TimeoutError when it takes too
    long."""
    async with asyncio.timeout(HANDSHAKE_S):
        try:
            await writer.start_tls(context, server_hostname=SERVICE_NAME)
        except ssl.SSLCertVerificationError as error:
            raise HandshakeFailed(
                f"its certificate is refused ({_reason(error)}); it needs one that the authority of "
                f"{CA} made for a service"
            ) from error
        except OSError as error:
            raise HandshakeFailed(f"it does not speak TLS 1.3: {_reason(error)}") from error
        try:
            greeting = await reader.readexactly(len(GREETING))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise HandshakeFailed(
                f"it refuses our certificate; set {CERT} and {KEY} to those of a client that the "
                "authority of the service made"
            ) from error
    if greeting != GREETING:
        raise HandshakeFailed("it is not a sandbox service of this version of Headrace")


def _reason(error: Exception) -> str:
    """The reason that OpenSSL gives, in words."""
    reason = getattr(error, "verify_message", None) or getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else str(error) or type(error).__name__
