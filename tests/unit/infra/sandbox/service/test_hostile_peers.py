"""Neither end of a connection trusts the other: a service that was taken over cannot harm its worker,
and a client that misbehaves ends only its own connection."""

import asyncio
import json
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from infra.ports.services import SandboxOwner
from infra.sandbox.service import client, frames, peer
from infra.sandbox.service.child import ChildService
from infra.sandbox.service.client import SandboxClient
from infra.sandbox.service.connect import RemoteService
from infra.sandbox.service.frames import HEAD, LARGEST_ANSWER, FrameKind
from infra.sandbox.service.listener import SandboxListener
from infra.sandbox.service.streams import WINDOW
from schemas.artifact_refs import ArtifactRef
from schemas.errors import TransientError
from schemas.sampling import Message
from tests.kit.sandbox_certificates import tls_context
from tests.kit.sockets import DeadSockets
from tests.kit.user_snapshots import rollout_of, snapshot_of

pytestmark = pytest.mark.processes

MAIN = """
from headrace import AgentWorkflow, Grader


class Do(AgentWorkflow):
    async def run(self, ctx):
        return [{"role": "assistant", "content": "fine"}]


class Check(Grader):
    async def grade(self, ctx): ...
"""
SNAPSHOT = snapshot_of(MAIN)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def frame(kind: int, number: int, payload: bytes = b"") -> bytes:
    return HEAD.pack(len(payload), kind, number) + payload


HELLO = frame(FrameKind.HELLO, 0, b"{}")


class HostileAtFirst:
    """A service whose first connection is to a script, and the later ones to a real child."""

    name = "the sandbox service"

    def __init__(self, script: Script) -> None:
        self._script: Script | None = script
        self._child = ChildService("bwrap")
        self.tasks: list[asyncio.Task[None]] = []

    async def connect(self) -> Streams:
        script, self._script = self._script, None
        if script is None:
            return await self._child.connect()
        ours, theirs = socket.socketpair()
        end = await asyncio.open_connection(sock=theirs)
        self.tasks.append(asyncio.ensure_future(self._play(script, *end)))
        return await asyncio.open_connection(sock=ours, limit=1 << 20)

    async def _play(
        self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            await script(reader, writer)
            await reader.read()
        except ConnectionError:
            pass  # the client has had enough
        finally:
            writer.close()

    async def disconnect(self, *, within_s: float = 0.0) -> None:
        await self._child.disconnect(within_s=within_s)


async def fetch(ref: ArtifactRef) -> bytes:
    return SNAPSHOT


async def say(user: SandboxClient) -> str:
    result = await user.run_workflow(
        rollout_of(SNAPSHOT),
        owner=SandboxOwner("run-1"),
        sample="s",
        prompt=[Message(role="user", content="?")],
        metadata={},
        base_path="/v1/samples/s",
        api_key="key",
    )
    assert result.messages is not None
    return result.messages[0].content


def after_call(*sent: bytes) -> Script:
    """A script that greets, waits for the call and then sends this."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        while FrameKind(HEAD.unpack(await reader.readexactly(HEAD.size))[1]) is FrameKind.BEAT:
            pass
        for data in sent:
            writer.write(data)
            await writer.drain()

    return script


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A script that says nothing."""


async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A script that never stops sending beats."""
    writer.write(HELLO)
    while not reader.at_eof():
        writer.write(frame(FrameKind.BEAT, 0) * 5000)
        await writer.drain()


async def hidden_flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A script that sends answers to requests that nobody made."""
    writer.write(HELLO)
    while not reader.at_eof():
        writer.write(frame(FrameKind.RESULT, 77, b"x" * 1024) * 1000)
        await writer.drain()


def answer(number: int, **fields: object) -> bytes:
    return frame(FrameKind.RESULT, number, json.dumps(fields).encode())


WANTED = frame(
    FrameKind.SNAPSHOT,
    1,
    json.dumps({"sha256": rollout_of(SNAPSHOT).snapshot.sha256}).encode(),
)
"""A request for the snapshot of the open call."""

HOSTILE: dict[str, Script] = {
    "junk": after_call(os.urandom(1 << 16)),
    "no hello": silent,
    "ends": after_call(b"\0"),
    "half a frame": after_call(HEAD.pack(1000, FrameKind.RESULT, 1), b"x" * 10),
    "endless": after_call(HEAD.pack(LARGEST_ANSWER, FrameKind.RESULT, 1), b"x" * (2 << 20)),
    "too large": after_call(HEAD.pack(LARGEST_ANSWER + 1, FrameKind.RESULT, 1)),
    "an unknown kind": after_call(frame(99, 1)),
    "a kind of the other end": after_call(frame(FrameKind.CALL, 1, b"x")),
    "no answer": after_call(frame(FrameKind.RESULT, 1, b"[1]")),
    "another answer": after_call(answer(1, id="another", messages=None)),
    "the answer of a grader": after_call(answer(1, id="s", grades=[])),
    "no error": after_call(frame(FrameKind.FAILURE, 1, b'{"kind": "SystemExit"}')),
    "beats": flood,
    "strange answers": hidden_flood,
    "bytes over the window": after_call(
        WANTED,
        *[frame(FrameKind.DATA, 1, b"x" * frames.CHUNK)] * (WINDOW // frames.CHUNK + 2),
    ),
    "credit over the window": after_call(WANTED, frame(FrameKind.CREDIT, 1, b"\xff\xff\xff\xff")),
    "the same stream twice": after_call(
        *[frame(FrameKind.CONNECT, 1, b'{"socket": "/x"}')] * 2,
    ),
    "endless requests": after_call(
        *[frame(FrameKind.OPEN_SOCKET, n, b'{"run": "run-1"}') for n in range(peer.TOKENS * 2)]
    ),
    "a request that is none": after_call(frame(FrameKind.OPEN_SOCKET, 1, b"{}")),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_service_only_delays_its_worker(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "FRAME_S", 0.3)
    monkeypatch.setattr(client, "HELLO_S", 0.3)
    monkeypatch.setattr(peer, "BEAT_S", 0.2)
    monkeypatch.setattr(peer, "SILENCE_BEATS", 10)
    service, sockets = HostileAtFirst(HOSTILE[name]), DeadSockets()
    user = SandboxClient(service, fetch=fetch, sockets=sockets)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TransientError):
        async with asyncio.timeout(20):
            await say(user)
    monkeypatch.setattr(client, "HELLO_S", 60)
    monkeypatch.setattr(peer, "SILENCE_BEATS", 1000)
    assert await say(user) == "fine"
    await user.aclose()
    await asyncio.gather(*service.tasks)
    assert sockets.opened == []
    sockets.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


async def exchange(*sent: bytes, num_answers: int) -> list[tuple[FrameKind, bytes]]:
    """The first frames with which a client answers those of a service, while a call is open."""
    found: list[tuple[FrameKind, bytes]] = []
    done = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        largest = dict.fromkeys(FrameKind, 1 << 20)
        received = frames.FrameReader(reader, largest)
        while (await received.read())[0] is not FrameKind.CALL:
            pass
        writer.write(b"".join(sent))
        while len(found) < num_answers:
            kind, _, payload = await received.read()
            if kind is not FrameKind.BEAT:
                found.append((kind, payload))
        done.set()

    service = HostileAtFirst(script)
    sockets = DeadSockets()
    user = SandboxClient(service, fetch=fetch, sockets=sockets)
    call = asyncio.ensure_future(say(user))
    async with asyncio.timeout(10):
        await done.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await user.aclose()
    await asyncio.gather(*service.tasks)
    sockets.close()
    return found


async def test_a_service_gets_sockets_only_of_runs_with_open_calls() -> None:
    other = frame(FrameKind.OPEN_SOCKET, 1, b'{"run": "run-2"}')
    wider = frame(FrameKind.OPEN_SOCKET, 2, b'{"run": "run-1", "network": ["10.0.0.1:22"]}')
    own = frame(FrameKind.OPEN_SOCKET, 3, b'{"run": "run-1"}')
    answers = await exchange(other, wider, own, num_answers=3)
    assert [kind for kind, _ in answers] == [
        FrameKind.FAILURE,
        FrameKind.FAILURE,
        FrameKind.RESULT,
    ]
    assert json.loads(answers[0][1])["kind"] == "refused"


async def test_a_service_reads_only_snapshots_that_open_calls_need() -> None:
    request = frame(FrameKind.SNAPSHOT, 1, b'{"sha256": "%s"}' % (b"0" * 64))
    assert await exchange(request, num_answers=1) == [(FrameKind.RESET, b"")]


async def test_a_service_cannot_connect_to_other_sockets_of_the_machine(tmp_path: Path) -> None:
    reached = []
    server = await asyncio.start_unix_server(lambda *_: reached.append(1), tmp_path / "s")
    request = frame(FrameKind.CONNECT, 1, json.dumps({"socket": str(tmp_path / "s")}).encode())
    assert await exchange(request, num_answers=1) == [(FrameKind.RESET, b"")]
    server.close()
    assert not reached


@pytest.fixture
async def listener() -> AsyncIterator[SandboxListener]:
    made = SandboxListener("tcp://127.0.0.1:0", tls_context("service"), level="bwrap")
    await made.listen()
    yield made
    await made.aclose()


@pytest.mark.parametrize(
    "sent",
    [
        os.urandom(1 << 16),
        frame(FrameKind.RESULT, 1, b"{}") * 100_000,
        HEAD.pack(frames.LARGEST_CALL + 1, FrameKind.CALL, 1),
        frame(FrameKind.CALL, 1, b"\xff\xff\xff\xff{}"),
        frame(FrameKind.CALL, 1, b"\0\0\0\2{}[]"),
        frame(
            FrameKind.DISCOVER, 1, b'{"sha256": "../../etc/passwd", "size": 1, "entrypoints": []}'
        ),
        frame(FrameKind.HELLO, 1, b"{}"),
    ],
    ids=["junk", "flood", "too large", "no head", "no call", "no hash", "hello"],
)
async def test_a_hostile_client_ends_only_its_own_connection(
    listener: SandboxListener, sent: bytes
) -> None:
    remote = RemoteService("127.0.0.1", listener.port, tls_context("client"))
    reader, writer = await remote.connect()
    writer.write(sent)
    async with asyncio.timeout(10):
        try:
            while await reader.read(1 << 16):
                pass
        except ConnectionError:
            pass
    writer.close()
    reader, writer = await remote.connect()
    head = await reader.readexactly(HEAD.size)
    assert FrameKind(HEAD.unpack(head)[1]) is FrameKind.HELLO
    writer.close()
