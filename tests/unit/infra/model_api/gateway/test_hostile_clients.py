"""The gateway and the API server under clients that try to exhaust them, over real sockets."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from headrace.relay import connect
from infra.http.limits import ConnectionLimits, OpenConnections
from infra.http.server import HttpServer
from infra.model_api.gateway import bodies, server, sessions
from infra.model_api.gateway.server import HttpGateway, connections_of_a_socket
from infra.model_api.wire.request import ModelRequest
from infra.settings.settings import Settings
from producers import serve
from schemas.errors import InvalidConfig
from tests.kit.http_victim import Quick
from tests.kit.platform import PATIENCE, ROOT, eventually
from tests.kit.sockets import chat_url, http_client
from tests.kit.specs import group_spec, template

MIB = 1 << 20
LARGE = 8 * MIB
SHORT = ConnectionLimits(head_s=0.3, body_s=0.3, body_rate=1 << 20, connections=128)
FOREVER = ConnectionLimits(head_s=3600, body_s=3600, connections=128)
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


class Victim:
    """A gateway in another process."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.http_victim", kind],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = self._line()
        self.path, self.key, self.address = said["path"], said["key"], said["address"]
        self.others: list[str] = said["others"]

    def connect(self, address: str | None = None) -> socket.socket:
        """A connection to its socket, to its port on 127.0.0.1, or to this socket."""
        if isinstance(self.address, int):
            return socket.create_connection(("127.0.0.1", self.address))
        client = socket.socket(socket.AF_UNIX)
        client.connect(address or self.address)
        return client

    def answer(self) -> int:
        """The status that a good client gets."""
        # A blocking connect waits while the queue of the socket is full, as the SDK's relay does. That
        # of httpx fails.
        http = HTTPConnection("gateway", timeout=30)
        http.sock = self.connect()
        with contextlib.closing(http):
            http.request("POST", f"{self.path}/chat/completions", json.dumps(HELLO), auth(self.key))
            return http.getresponse().status

    def figures(self, ask: str = "look") -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{ask}\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def victim(kind: str = "") -> Iterator[Victim]:
    made = Victim(kind)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def head(path: str, key: str, length: int) -> bytes:
    return (
        f"POST {path}/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def grown_by(kind: str, num: int) -> int:
    """The number of MiB that a gateway grows by when this many clients send it large bodies with a
    wrong key."""
    with victim(kind) as gateway, contextlib.ExitStack() as stack:
        before = gateway.figures()["peak_kb"]
        for _ in range(num):
            client = stack.enter_context(gateway.connect())
            client.settimeout(5)
            client.sendall(head(gateway.path, "wrong", LARGE))
            with contextlib.suppress(OSError):
                client.sendall(b"x" * (LARGE - 1))
        assert gateway.answer() == 200, "a good client is served meanwhile"
        return int(gateway.figures()["peak_kb"] - before) // 1024


def auth(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.processes
def test_a_body_is_not_read_before_its_key_is_known_to_be_good() -> None:
    assert grown_by("", 100) < 50


@pytest.mark.processes
@pytest.mark.parametrize("begun", [b"", b"POST /v1/samples/x HTTP/1.1\r\nhost:", b"CONNECT a"])
def test_a_thousand_half_open_connections_cost_little(begun: bytes) -> None:
    with victim() as gateway, contextlib.ExitStack() as stack:
        before = gateway.figures()["peak_kb"]
        addresses = [*gateway.others, gateway.address]
        for number in range(1000):
            client = stack.enter_context(gateway.connect(addresses[number % len(addresses)]))
            client.sendall(begun)
        began = time.monotonic()
        assert gateway.answer() == 200
        assert time.monotonic() - began < PATIENCE
        assert (gateway.figures()["peak_kb"] - before) / 1024 < 50


@pytest.mark.processes
def test_twin_bodies_that_are_read_first_are_all_held() -> None:
    assert grown_by("naive-bodies", 25) > 80


SOCKET: list[Path] = []
"""The socket of the run that all sessions belong to."""


@asynccontextmanager
async def gateway(limits: ConnectionLimits) -> AsyncIterator[sessions.GatewaySession]:
    made = HttpGateway(Quick(), limits=limits)
    await made.start()
    SOCKET[:] = [await made.open_socket("r1")]
    yield made.open(group_spec(template()), 0, deadline_s=600)
    await made.aclose()


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(url: str | None = None) -> AsyncIterator[Connection]:
    """A connection to the socket, or with `url` to its port."""
    port = urlsplit(url).port if url else None
    reader, writer = await (
        asyncio.open_connection("127.0.0.1", port)
        if port
        else asyncio.open_unix_connection(sock=await connect(str(SOCKET[0])))
    )
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """The bytes that the server sends until it closes; empty if it cuts the connection off."""
    try:
        return await asyncio.wait_for(reader.read(), PATIENCE * 30)
    except ConnectionError:
        return b""


async def served(session: sessions.GatewaySession) -> None:
    async with http_client(SOCKET[0]) as http:
        answer = await http.post(chat_url(session), json=HELLO, headers=auth(session.api_key))
    assert answer.status_code == 200, answer.text


CUT_OFF = b"cut off"
"""The connection was closed while the client wrote, which may lose the answer."""


async def drip(session: sessions.GatewaySession, data: bytes, first: int) -> bytes:
    """Send `first`, then one byte at a time; return the server's response."""
    async with connected() as (reader, writer):
        writer.write(data[:first])
        try:
            for number in range(first, len(data)):
                writer.write(data[number : number + 1])
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    return await asyncio.wait_for(reader.readline(), 0.02)
        except ConnectionError:
            return CUT_OFF
    return b"all of it was taken"


@pytest.mark.parametrize("what", ["head", "body"])
async def test_a_request_that_comes_byte_by_byte_has_a_deadline(what: str) -> None:
    async with gateway(SHORT) as session:
        request = head(session.base_path, session.api_key, 4096)
        first = len(request) if what == "body" else 1
        slow = [drip(session, request + b"x" * 4096, first) for _ in range(20)]
        *said, _ = await asyncio.gather(*slow, served(session))
        assert {each[:12] for each in said if each} <= {b"HTTP/1.1 408", CUT_OFF}
        assert session.calls[0].turn is not None
        assert len(session.calls) == 1, "nothing was asked by those"


@pytest.mark.parametrize("what", ["head", "body", "nothing"])
async def test_twin_without_deadlines_they_stay(what: str) -> None:
    async with gateway(FOREVER) as session:
        request = head(session.base_path, session.api_key, 4096)
        async with connected() as (reader, writer):
            writer.write({"head": request[:9], "body": request, "nothing": b""}[what])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(), 3 * SHORT.head_s)


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with gateway(SHORT), connected() as (reader, _):
        assert await rest(reader) == b""


async def test_a_head_without_end_is_refused() -> None:
    async with (
        gateway(ConnectionLimits()) as session,
        connected() as (reader, writer),
    ):
        said = b""
        with contextlib.suppress(ConnectionError):
            writer.write(b"POST / HTTP/1.1\r\n")
            for _ in range(64):
                writer.write(b"x: " + b"y" * 8000 + b"\r\n")
                await writer.drain()
            said = await reader.read()
        assert said[:12] in (b"HTTP/1.1 431", b""), "or the answer was lost to the reset"
        await served(session)


@asynccontextmanager
async def flooded(session: sessions.GatewaySession, num: int) -> AsyncIterator[list[Connection]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connected()) for _ in range(num)]


@pytest.fixture
def most_open(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of connections that a server had open, each time it accepted one."""
    found: list[int] = []
    enter = OpenConnections.enter

    def noted(self: OpenConnections, connection: Any) -> None:
        enter(self, connection)
        found.append(self.num)

    monkeypatch.setattr(OpenConnections, "enter", noted)
    return found


async def test_a_flood_of_connections_closes_the_oldest_that_wait(most_open: list[int]) -> None:
    async with gateway(FOREVER) as session, flooded(session, 150):
        await served(session)
    assert max(most_open) <= connections_of_a_socket(FOREVER) + 1


async def test_twin_without_room_being_made_they_pile_up(
    most_open: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenConnections, "make_room", lambda self: False)
    async with gateway(FOREVER) as session, flooded(session, 150):
        await served(session)
    assert max(most_open) > 100


async def test_a_request_in_progress_is_never_closed_for_others() -> None:
    class Slow(Quick):
        async def sample(self, request: Any) -> Any:
            await go.wait()
            return await super().sample(request)

    go = asyncio.Event()
    made = HttpGateway(Slow(), limits=FOREVER)
    await made.start()
    SOCKET[:] = [await made.open_socket("r1")]
    session = made.open(group_spec(template()), 0, deadline_s=600)
    asking = asyncio.ensure_future(served(session))
    while not session.calls:
        await asyncio.sleep(0.01)
    async with flooded(session, 100):
        go.set()
        await asking
    await made.aclose()


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "quiet"), [("", True), ("asyncio-listener", False)])
def test_at_the_limit_of_files_it_neither_spins_nor_fills_the_log(kind: str, quiet: bool) -> None:
    """The second case is the twin: asyncio's own listener, as it was used before."""
    with victim(kind) as gateway, contextlib.ExitStack() as stack:
        gateway.figures("fill")
        clients = [stack.enter_context(gateway.connect()) for _ in range(20)]

        def known() -> int | None:
            lines = int(gateway.figures()["lines"])
            return lines if lines else None

        lines = eventually(known, within_s=20, what="a line of the log")
        if not quiet:
            eventually(
                lambda: True if gateway.figures()["lines"] > 1000 else None,
                within_s=20,
                what="lines without end",
            )
            return
        before = gateway.figures()["cpu_s"]
        clients[0].settimeout(2)
        with pytest.raises(TimeoutError):
            clients[0].recv(1)
        after = gateway.figures()
        assert after["lines"] - lines <= 2
        assert after["cpu_s"] - before < 1.0
        gateway.figures("free")
        assert gateway.answer() == 200


async def test_bodies_of_refused_requests_are_not_kept() -> None:
    async with gateway(ConnectionLimits()) as session:
        async with http_client(SOCKET[0]) as http:
            refused: tuple[Any, ...] = ({**HELLO, "n": 65}, {"messages": []})
            for body in refused:
                answer = await http.post(
                    chat_url(session), json=body, headers=auth(session.api_key)
                )
                assert answer.status_code == 400
        assert session.calls == []
        [(noted, _)] = session.ask(ModelRequest(messages=()))
        session.refuse(noted)
        assert (noted.messages, noted.refused, len(session.calls)) == ((), True, 1)


async def flood(path: str, num: int, *, seconds: float) -> int:
    """Send bad requests over this many connections; return how many were answered."""
    bad = head(path, "bad", 0)
    answered = 0

    async def one() -> None:
        nonlocal answered
        async with connected() as (reader, writer):
            while True:
                writer.write(bad)
                await reader.readuntil(b"}}")
                answered += 1

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(one() for _ in range(num)), return_exceptions=True)
    return answered


async def test_a_flood_of_bad_requests_is_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REFUSED_AT_ONCE", 10)
    async with gateway(ConnectionLimits()) as session:
        answered, _ = await asyncio.gather(
            flood(session.base_path, 32, seconds=1.0), served(session)
        )
        assert answered <= 10 + server.REFUSED_PER_S + 32
        await served(session)


async def test_twin_without_a_pace_it_takes_the_workers_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "REFUSED_PER_S", 1_000_000)
    async with gateway(ConnectionLimits()) as session:
        assert await flood(session.base_path, 32, seconds=1.0) > 300


async def test_refusals_that_would_wait_too_long_end_their_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("REFUSED_AT_ONCE", "MOST_WAITING_REFUSALS"):
        monkeypatch.setattr(server, name, 1)
    monkeypatch.setattr(server, "REFUSED_PER_S", 1)
    async with gateway(ConnectionLimits()) as session, flooded(session, 4) as clients:
        for _, writer in clients:
            writer.write(head(session.base_path, "bad", 0))
        answers = [await reader.readuntil(b"}}") for reader, _ in clients]
        assert all(b"401" in answer for answer in answers)
        assert sum(b"connection: close" in answer for answer in answers) == 2


@pytest.mark.parametrize("announced", [True, False])
async def test_the_bytes_of_a_sample_are_budgeted(
    monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    monkeypatch.setattr(sessions, "MOST_BYTES", 10_000)
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 3000}]}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        yield body

    async with gateway(ConnectionLimits()) as session, http_client(SOCKET[0]) as http:
        answers = [
            await http.post(
                chat_url(session),
                content=body if announced else pieces(),
                headers=auth(session.api_key),
            )
            for _ in range(5)
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 413, 413]
    assert "at most 10000 bytes in all" in answers[-1].text
    assert len(session.calls) == 3


async def test_too_large_a_body_is_refused_before_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LARGE_BODIES", 1)
    async with (
        gateway(ConnectionLimits()) as session,
        connected() as (reader, writer),
    ):
        writer.write(head(session.base_path, session.api_key, LARGE + 1))
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")


async def test_large_bodies_of_one_run_wait_for_each_other() -> None:
    turns, inside, most = bodies.LargeBodyTurns(), 0, 0

    async def one(run: str) -> None:
        nonlocal inside, most
        async with turns.turn(run):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(one("a") for _ in range(40)))
    assert most == bodies.LARGE_OF_A_RUN
    await asyncio.gather(*(one(str(n)) for n in range(100)))
    assert most == bodies.LARGE_BODIES
    assert turns._runs == {}


async def test_the_api_server_gives_heads_a_deadline_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serve, "LIMITS", SHORT)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    url = {"HEADRACE_HOME": str(tmp_path), "HEADRACE_URL": "http://127.0.0.1:0"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        url["HEADRACE_URL"] = f"http://127.0.0.1:{free.getsockname()[1]}"
    server = serve._server(app, Settings.load(url))  # type: ignore[arg-type]  # any ASGI application
    await server.listen()
    task = asyncio.ensure_future(server.serve())
    async with contextlib.AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(connected(url["HEADRACE_URL"])) for _ in range(60)]
        for _, writer in slow:
            writer.write(b"GET /healthz HTTP/1.1\r\nhost:")
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{url['HEADRACE_URL']}/healthz")).status_code == 204
        for reader, _ in slow:
            assert (await rest(reader))[:12] in (b"HTTP/1.1 408", b"")
    server.stop()
    await task


async def test_a_taken_port_is_refused_by_its_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = HttpServer(lambda: None, host="127.0.0.1", port=port, limits=ConnectionLimits())
        with pytest.raises(InvalidConfig, match=f"cannot listen on 127.0.0.1:{port}"):
            await server.listen()
