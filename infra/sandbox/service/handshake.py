"""The handshake of a sandbox service that is reached by TCP. Both ends prove that they have the key, and
neither sends it.

Each end picks a random nonce. The client's proof comes first, so a stranger learns nothing from a
service. The proofs of the two ends differ, so a stranger cannot send a proof back.
"""

import asyncio
import hashlib
import hmac
import secrets

MAGIC = b"headrace sandbox 1\n"
NONCE_BYTES = 32
HANDSHAKE_S = 5.0
"""How long a whole handshake may take."""


class HandshakeFailed(ConnectionError):
    """The other end has another key, or is something else."""


async def admit_client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes
) -> None:
    """Do the service's part of the handshake. Raises HandshakeFailed, and TimeoutError when it takes
    too long."""
    async with asyncio.timeout(HANDSHAKE_S):
        ours = secrets.token_bytes(NONCE_BYTES)
        writer.write(MAGIC + ours)
        theirs = await _read(reader, NONCE_BYTES)
        proof = await _read(reader, hashlib.sha256().digest_size)
        if not hmac.compare_digest(proof, _proof(key, b"client", ours, theirs)):
            raise HandshakeFailed("the client has another key")
        writer.write(_proof(key, b"service", ours, theirs))
        await writer.drain()


async def greet_service(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes
) -> None:
    """Do the client's part of the handshake. Raises HandshakeFailed, and TimeoutError when it takes too
    long."""
    async with asyncio.timeout(HANDSHAKE_S):
        if await _read(reader, len(MAGIC)) != MAGIC:
            raise HandshakeFailed("it is not a sandbox service of this version of Headrace")
        theirs = await _read(reader, NONCE_BYTES)
        ours = secrets.token_bytes(NONCE_BYTES)
        writer.write(ours + _proof(key, b"client", theirs, ours))
        try:
            proof = await _read(reader, hashlib.sha256().digest_size)
        except HandshakeFailed:
            raise HandshakeFailed(
                "it refuses our key; set the same HEADRACE_SANDBOX_KEY for the service and its clients"
            ) from None
        if not hmac.compare_digest(proof, _proof(key, b"service", theirs, ours)):
            raise HandshakeFailed("it does not have our key")


async def _read(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise HandshakeFailed("it closed the connection") from error


def _proof(key: bytes, end: bytes, service: bytes, client: bytes) -> bytes:
    return hmac.digest(key, MAGIC + end + b"\n" + service + client, "sha256")
