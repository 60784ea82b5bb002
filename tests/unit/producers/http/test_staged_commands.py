"""`headrace dataset` against the application over HTTP: in parts, as versions, and after a loss."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from infra.blobs import uploads
from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer
from producers.cli.client import Client, ServerAddress
from producers.cli.commands import dataset
from producers.cli.commands.dataset import upload_file, version_name
from producers.cli.errors import Failure
from tests.kit.application import API_KEY, Application, rows

pytestmark = pytest.mark.postgres


@pytest.fixture
async def address(app: Application, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The URL of a server of the application, which takes files in parts of 1000 bytes."""
    monkeypatch.setattr(uploads, "part_bytes", lambda _: 1000)
    monkeypatch.setattr(dataset, "LARGE_BYTES", 0)
    server = HttpServer(app.app, host="127.0.0.1", port=0, limits=ConnectionLimits())
    await server.listen()
    serving = asyncio.ensure_future(server.serve())
    yield f"http://127.0.0.1:{server.port}"
    server.stop()
    await asyncio.wait_for(serving, 10)


async def upload(address: str, file: Path, *, overwrites: bool = False) -> str:
    def send() -> str:
        with Client(ServerAddress(address, API_KEY)) as client:
            return version_name(
                upload_file(client, file, "sums", quiet=True, overwrites=overwrites)
            )

    return await asyncio.to_thread(send)


async def test_files_become_versions(app: Application, address: str, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    for count, name in ((200, "sums"), (300, "sums@2")):
        file.write_text(rows(count))
        assert await upload(address, file, overwrites=True) == name
        assert await upload(address, file) == name, "the same file is the same version"
    file.write_text(rows(100))
    with pytest.raises(Failure, match="--overwrite"):
        await upload(address, file)
    saved = await app.api.get("/api/v1/datasets/sums/content")
    assert saved.text == rows(300)


async def test_a_refused_file_is_reported_with_its_issues(address: str, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"user_prompt": "x"}\n' * 5)
    with pytest.raises(Failure) as caught:
        await upload(address, file)
    assert "ground_truth" in str(caught.value)
    assert caught.value.issues


async def test_a_lost_part_is_sent_again_alone(
    app: Application, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(rows(200))
    whole = Client.put_signed
    sent: list[str] = []
    most = 3

    def put_some(self: Client, url: str, pieces: Iterator[bytes], size: int) -> str:
        if len(sent) == most:
            raise Failure("STOPPED", "the test stops here")
        sent.append(url.partition("?")[0])
        return whole(self, url, pieces, size)

    monkeypatch.setattr(Client, "put_signed", put_some)
    with pytest.raises(Failure, match="stops here"):
        await upload(address, file)
    first = list(sent)
    sent.clear()
    most = 1000
    assert await upload(address, file) == "sums"
    assert not set(first) & set(sent)
    assert len(first) + len(sent) == -(-file.stat().st_size // 1000)
