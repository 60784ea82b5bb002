"""The sockets of the gateway: the identity of a sandbox, private, and removed."""

import asyncio
import contextlib
import socket
import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from infra.held_directory import HELD
from infra.http.limits import ConnectionLimits
from infra.http.socket_directory import PREFIX, SocketDirectory
from infra.model_api.gateway import server
from infra.model_api.gateway.server import HttpGateway
from infra.sandbox.user_process import user_group
from schemas.errors import InvalidConfig
from tests.kit.http_victim import Quick
from tests.kit.sockets import HOST, chat_url, http_client
from tests.kit.specs import group_spec, template

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def gateway() -> AsyncIterator[HttpGateway]:
    made = HttpGateway(Quick(), limits=ConnectionLimits(connections=64))
    await made.start()
    yield made
    await made.aclose()


async def post(path: Path, url: str, key: str) -> httpx.Response:
    async with http_client(path) as http:
        return await http.post(url, json=HELLO, headers={"authorization": f"Bearer {key}"})


async def test_a_socket_reaches_the_samples_of_its_run_only(gateway: HttpGateway) -> None:
    session = gateway.open(group_spec(template()), 0, deadline_s=30)
    ours = await gateway.open_socket("r1")
    others = await gateway.open_socket("r2")
    assert (await post(ours, chat_url(session), session.api_key)).status_code == 200
    refused = await post(others, chat_url(session), session.api_key)
    unknown = await post(others, f"{HOST}/v1/samples/none/chat/completions", session.api_key)
    assert (refused.status_code, refused.content) == (404, unknown.content)
    assert len(session.calls) == 1
    wrong = await post(ours, chat_url(session), "hr-wrong")
    assert wrong.status_code == 401, "the key of the sample is checked too"


async def test_the_listener_on_tcp_serves_no_samples(gateway: HttpGateway) -> None:
    session = gateway.open(group_spec(template()), 0, deadline_s=30)
    url = gateway.internal_url.replace("/internal/sample", f"{session.base_path}/chat/completions")
    async with httpx.AsyncClient() as http:
        answer = await http.post(
            url, json=HELLO, headers={"authorization": f"Bearer {session.api_key}"}
        )
    assert answer.status_code == 404
    path = await gateway.open_socket("r1")
    answer = await post(path, f"{HOST}/internal/sample", "any")
    assert answer.status_code == 404, "and sockets serve nothing else"


async def test_a_closed_socket_is_gone_with_its_connections(gateway: HttpGateway) -> None:
    path = await gateway.open_socket("r1")
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(b"POST / HTTP/1.1\r\n")
    await asyncio.sleep(0)
    await gateway.close_socket(path)
    await gateway.close_socket(path)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    assert not path.exists()
    await gateway.open_socket("r1")
    await gateway.aclose()
    assert not path.parent.exists()


async def test_others_cannot_find_or_pass_the_directory() -> None:
    group = user_group()
    made = HttpGateway(Quick(), group=group)
    await made.start()
    path = await made.open_socket("r1")
    directory, itself = path.parent.stat(), path.stat()
    if group is None:
        assert stat.S_IMODE(directory.st_mode) == 0o700
    else:
        assert (stat.S_IMODE(directory.st_mode), directory.st_gid) == (0o710, group)
        assert (stat.S_IMODE(itself.st_mode), itself.st_gid) == (0o660, group)
    assert stat.S_IMODE(itself.st_mode) & 0o007 == 0
    await made.aclose()


def test_directories_of_killed_processes_are_removed() -> None:
    left = Path(tempfile.mkdtemp(prefix=PREFIX))
    (left / HELD).touch()
    kept = SocketDirectory()
    made = SocketDirectory()
    assert not left.exists()
    assert kept.path.exists(), "its owner lives"
    kept.close()
    made.close()


async def test_a_gateway_removes_the_directories_of_killed_ones() -> None:
    left = Path(tempfile.mkdtemp(prefix=PREFIX))
    (left / HELD).touch()
    made = HttpGateway(Quick())
    await made.start()
    assert not left.exists()
    await made.aclose()


async def test_too_long_a_path_is_refused_by_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    made = HttpGateway(Quick())
    await made.start()
    with pytest.raises(InvalidConfig, match="set TMPDIR to a shorter path"):
        await made.open_socket("r1")
    await made.aclose()


async def test_a_sandbox_that_takes_all_connections_takes_only_its_own(
    gateway: HttpGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 8)
    greedy, other = await gateway.open_socket("r2"), await gateway.open_socket("r1")
    session = gateway.open(group_spec(template()), 0, deadline_s=30)
    taken: list[socket.socket] = []
    with contextlib.suppress(BlockingIOError):
        while len(taken) < 200:
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            taken.append(client)
            client.connect(str(greedy))
    assert len(taken) < 60, "the rest does not even connect, as the backlog is small"
    await asyncio.sleep(0.05)
    assert gateway.num_connections(greedy) <= 9
    assert (await post(other, chat_url(session), session.api_key)).status_code == 200
    for client in taken:
        client.close()
