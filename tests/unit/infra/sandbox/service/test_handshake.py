"""Only clients with the key reach a sandbox service, and the key is never sent."""

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from infra.sandbox.service import handshake, listener
from infra.sandbox.service.client import SandboxClient
from infra.sandbox.service.connect import RemoteService
from infra.sandbox.service.handshake import MAGIC, NONCE_BYTES, HandshakeFailed, greet_service
from infra.sandbox.service.listener import SandboxListener
from schemas.artifact_refs import ArtifactRef
from schemas.errors import SandboxAway

KEY = b"a key that nobody else has"
PROOF_BYTES = hashlib.sha256().digest_size


@pytest.fixture
async def service() -> AsyncIterator[SandboxListener]:
    made = SandboxListener("tcp://127.0.0.1:0", KEY, level="bwrap")
    await made.listen()
    yield made
    await made.aclose()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """What arrives until the connection ends."""
    data = b""
    async with asyncio.timeout(10):
        try:
            while piece := await reader.read(1 << 16):
                data += piece
        except ConnectionError:
            pass
    return data


async def no_fetch(ref: ArtifactRef) -> bytes:
    raise AssertionError(ref)


async def test_another_key_is_refused_and_the_client_says_what_to_do(
    service: SandboxListener,
) -> None:
    remote = RemoteService("127.0.0.1", service.port, b"another key of somebody")
    with pytest.raises(HandshakeFailed, match="same HEADRACE_SANDBOX_KEY"):
        await remote.connect()
    user = SandboxClient(remote, fetch=no_fetch)
    await user.start()  # the worker starts, and its user code waits
    with pytest.raises(SandboxAway, match=f"127.0.0.1:{service.port}.*same HEADRACE_SANDBOX_KEY"):
        await user.discover(b"", ())
    await user.aclose()


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, b"\0" * (NONCE_BYTES + PROOF_BYTES), b"\0" * 1000],
    ids=["http", "zeros", "more"],
)
async def test_a_connection_without_the_handshake_is_dropped(
    service: SandboxListener, sent: bytes
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(sent)
    assert len(await read_all(reader)) == len(MAGIC) + NONCE_BYTES, "no proof and no hello"
    writer.close()


async def test_a_slow_handshake_is_dropped_at_its_deadline(
    service: SandboxListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)

    async def drip() -> None:
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.05)

    task = asyncio.ensure_future(drip())
    await read_all(reader)
    task.cancel()
    writer.close()


async def test_strangers_take_no_more_than_their_places(
    service: SandboxListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MOST_STRANGERS", 4)
    held = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(4)]
    for reader, _ in held:
        await reader.readexactly(len(MAGIC))
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    assert await read_all(reader) == b""
    for one in (writer, *(end for _, end in held)):
        one.close()


async def test_a_service_without_the_key_is_refused_also_if_it_sends_our_proof_back() -> None:
    """A stranger in the place of the service, which answers with what it received."""
    received = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        writer.write(MAGIC + b"\1" * NONCE_BYTES)
        received = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
        writer.write(received[NONCE_BYTES:])
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(host, port)
    with pytest.raises(HandshakeFailed, match="does not have our key"):
        await greet_service(reader, writer, KEY)
    writer.close()
    server.close()
    assert KEY not in received


async def test_the_proof_of_one_connection_is_of_no_use_in_another(
    service: SandboxListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = b""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    write = writer.write

    def record(data: bytes) -> None:
        nonlocal sent
        sent += data
        write(data)

    monkeypatch.setattr(writer, "write", record)
    await greet_service(reader, writer, KEY)
    writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(sent)
    assert len(await read_all(reader)) == len(MAGIC) + NONCE_BYTES
    writer.close()
