"""Only clients with a certificate of the operator's authority reach a sandbox service, and they talk to
no other service. A stranger holds few places for a few seconds."""

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra.sandbox.levels.bubblewrap_options import memory_file
from infra.sandbox.service import listener, tls
from infra.sandbox.service.client import SandboxClient
from infra.sandbox.service.connect import RemoteService
from infra.sandbox.service.listener import SandboxListener
from infra.sandbox.service.tls import (
    GREETING,
    SERVICE_NAME,
    HandshakeFailed,
    check_key_is_hidden,
    make_context,
)
from infra.settings.sandbox_service import CERT, KEY, SandboxCertificates
from schemas.artifact_refs import ArtifactRef
from schemas.errors import SandboxAway
from tests.kit.sandbox_certificates import SCRIPT, tls_context, tls_variables

HELLO = b"hello"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Session:
    """A session that says hello and runs no code."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, **_: object
    ) -> None:
        self._reader, self._writer = reader, writer

    async def serve(self) -> None:
        self._writer.write(HELLO)
        await self._reader.read()


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SandboxListener]:
    monkeypatch.setattr(listener, "ServiceSession", Session)
    made = SandboxListener("tcp://127.0.0.1:0", tls_context("service"), level="bwrap")
    await made.listen()
    yield made
    await made.aclose()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """The bytes that arrive until the connection ends."""
    data = b""
    async with asyncio.timeout(10):
        try:
            while piece := await reader.read(1 << 16):
                data += piece
        except OSError:
            pass
    return data


async def connect(service: SandboxListener, context: ssl.SSLContext | None = None) -> Streams:
    name = SERVICE_NAME if context else None
    return await asyncio.open_connection(
        "127.0.0.1", service.port, ssl=context, server_hostname=name
    )


async def reach(service: SandboxListener, context: ssl.SSLContext) -> None:
    """Connect as a client does. Raises HandshakeFailed."""
    _, writer = await RemoteService("127.0.0.1", service.port, context).connect()
    writer.close()


async def no_fetch(ref: ArtifactRef) -> bytes:
    raise AssertionError(ref)


def without_certificate() -> ssl.SSLContext:
    """A client that believes anybody and shows nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def posing_as_client(end: str, *, authority: str) -> ssl.SSLContext:
    """A client that believes anybody and shows this certificate."""
    context = without_certificate()
    files = tls_variables(end, authority=authority)
    certificates = SandboxCertificates.load(files)
    descriptor = memory_file(f"{certificates.certificate}\n{certificates.key}".encode())
    context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    return context


async def test_both_ends_with_certificates_of_one_authority_speak_tls_1_3(
    service: SandboxListener,
) -> None:
    reader, writer = await connect(service, tls_context("client"))
    assert await reader.readexactly(len(GREETING)) == GREETING
    assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
    writer.close()


@pytest.mark.parametrize(
    "context",
    [
        without_certificate,
        lambda: posing_as_client("client", authority="other"),
        lambda: posing_as_client("service", authority="ours"),
    ],
    ids=["none", "another authority", "the service's own"],
)
async def test_a_client_without_a_certificate_for_clients_gets_nothing(
    service: SandboxListener, context: "type[ssl.SSLContext]"
) -> None:
    reader, writer = await connect(service, context())
    assert await read_all(reader) == b"", "no greeting and no hello"
    writer.close()


async def test_an_older_tls_is_refused(service: SandboxListener) -> None:
    context = tls_context("client")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError):
        await connect(service, context)
    await reach(service, tls_context("client"))


async def test_a_refused_client_reads_what_to_do(service: SandboxListener) -> None:
    context = tls_context("client")
    other = SandboxCertificates.load(tls_variables("client", authority="other"))
    ours = SandboxCertificates.load(tls_variables("client"))
    mixed = SandboxCertificates(other.certificate, other.key, ours.authority)
    context = make_context(mixed, is_service=False)
    with pytest.raises(HandshakeFailed, match=f"it refuses our certificate; set {CERT}"):
        await reach(service, context)
    user = SandboxClient(RemoteService("127.0.0.1", service.port, context), fetch=no_fetch)
    await user.start()  # the worker starts, and its user code waits
    with pytest.raises(SandboxAway, match=f"127.0.0.1:{service.port}.*set {CERT}"):
        await user.discover(b"", ())
    await user.aclose()


async def test_a_client_refuses_a_service_of_another_authority(service: SandboxListener) -> None:
    with pytest.raises(HandshakeFailed, match=r"its certificate is refused \(self-signed"):
        await reach(service, tls_context("client", authority="other"))


async def test_a_client_refuses_another_client_in_the_place_of_the_service() -> None:
    """It has a certificate of our authority, but not for a service."""
    certificates = SandboxCertificates.load(tls_variables("client"))
    context = make_context(certificates, is_service=True)
    made = SandboxListener("tcp://127.0.0.1:0", context, level="bwrap")
    await made.listen()
    with pytest.raises(HandshakeFailed, match="its certificate is refused"):
        await reach(made, tls_context("client"))
    unnamed = tls_context("client")
    unnamed.check_hostname = False
    with pytest.raises(HandshakeFailed, match="purpose"):  # also if it had the name
        await reach(made, unnamed)
    await made.aclose()


async def test_a_client_refuses_a_service_without_tls() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    with pytest.raises(HandshakeFailed, match="does not speak TLS"):
        await RemoteService(host, port, tls_context("client")).connect()
    server.close()


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, b"\0" * 1000, b"\x16\x03\x01\xff\xff" + b"x" * 70_000],
    ids=["http", "zeros", "a long record"],
)
async def test_a_connection_without_tls_is_dropped(service: SandboxListener, sent: bytes) -> None:
    reader, writer = await connect(service)
    writer.write(sent)
    received = await read_all(reader)
    assert len(received) < 16, "an alert at most"
    writer.close()


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x00\xff"], ids=["nothing", "half a hello"])
async def test_a_slow_handshake_is_dropped_at_its_deadline(
    service: SandboxListener, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    usual = tls.HANDSHAKE_S
    monkeypatch.setattr(tls, "HANDSHAKE_S", 0.3)
    reader, writer = await connect(service)
    writer.write(sent)

    async def drip() -> None:
        while sent:
            writer.write(b"\0")
            await asyncio.sleep(0.05)

    task = asyncio.ensure_future(drip())
    assert await read_all(reader) == b""
    task.cancel()
    writer.close()
    monkeypatch.setattr(tls, "HANDSHAKE_S", usual)
    await reach(service, tls_context("client"))


async def test_strangers_take_no_more_than_their_places(
    service: SandboxListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MOST_STRANGERS", 4)
    usual = tls.HANDSHAKE_S
    monkeypatch.setattr(tls, "HANDSHAKE_S", 1.0)
    held = [await connect(service) for _ in range(4)]
    await asyncio.sleep(0)  # those before the next are accepted before it
    reader, writer = await connect(service)
    began = asyncio.get_running_loop().time()
    assert await read_all(reader) == b""
    assert asyncio.get_running_loop().time() - began < 0.9, "before the handshakes' deadline"
    writer.close()
    for reader, writer in held:  # those of strangers come back at the deadline
        assert await read_all(reader) == b""
        writer.close()
    monkeypatch.setattr(tls, "HANDSHAKE_S", usual)
    await reach(service, tls_context("client"))


async def test_many_clients_connect_at_the_same_time(service: SandboxListener) -> None:
    """Each sends its hello at once, which may arrive before the service expects TLS."""
    context = tls_context("client")
    await asyncio.gather(*(reach(service, context) for _ in range(50)))


async def test_sent_bytes_cannot_be_read_on_the_way(service: SandboxListener) -> None:
    seen = bytearray()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                seen.extend(data)
                sink.write(data)
            sink.close()

        there, back = await connect(service)
        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    reader, writer = await RemoteService(host, port, tls_context("client")).connect()
    assert await reader.readexactly(len(HELLO)) == HELLO
    writer.write(b"a secret of a user" * 10)
    writer.close()
    await read_all(reader)
    server.close()
    assert len(seen) > 500
    assert b"a secret of a user" not in seen
    assert GREETING not in seen


def test_a_key_of_another_certificate_is_refused() -> None:
    variables = {**tls_variables("client"), KEY: tls_variables("service")[KEY]}
    certificates = SandboxCertificates.load(variables)
    with pytest.raises(ValueError, match="cannot be used together: key values mismatch"):
        make_context(certificates, is_service=False)


def test_a_key_with_a_password_is_refused_and_asks_no_terminal(tmp_path: Path) -> None:
    command = "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -aes256 -pass pass:x"
    key = subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout
    certificates = SandboxCertificates.load({**tls_variables("client"), KEY: key})
    with pytest.raises(ValueError, match="cannot be used together"):
        make_context(certificates, is_service=False)


@pytest.mark.parametrize(
    ("level", "mode", "uid", "is_refused"),
    [
        ("process-trusted", 0o600, 1000, True),
        ("process-trusted", 0o640, 0, True),
        ("process-trusted", 0o600, 0, False),
        ("bwrap", 0o644, 1000, False),
    ],
)
def test_a_key_file_that_user_code_can_read_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    level: str,
    mode: int,
    uid: int,
    *,
    is_refused: bool,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: uid)
    file = tmp_path / "service.key"
    variables = tls_variables("service")
    file.write_text(variables[KEY])
    file.chmod(mode)
    for held in (SandboxCertificates.load({**variables, KEY: str(file)}),):
        if is_refused:
            with pytest.raises(ValueError, match=f"names the file {file}, which user code"):
                check_key_is_hidden(held, level)
        else:
            check_key_is_hidden(held, level)
    check_key_is_hidden(SandboxCertificates.load(variables), level)  # text is in no file


def test_the_script_adds_a_client_and_changes_nothing(tmp_path: Path) -> None:
    def make(*names: str) -> dict[str, bytes]:
        subprocess.run(["sh", SCRIPT, tmp_path / "made", *names], check=True)
        return {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}

    first = make("a")
    ends = ("ca", "service", "a")
    assert set(first) == {f"{end}.{kind}" for end in ends for kind in ("pem", "key")}
    second = make("a", "b")
    assert set(second) - set(first) == {"b.pem", "b.key"}
    assert first.items() <= second.items()
    assert all(not p.stat().st_mode & 0o077 for p in (tmp_path / "made").iterdir())
