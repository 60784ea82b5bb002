"""Speed and memory of signed transfers, against a bare file copy through the same HTTP server.

    python bench/transfers.py [--gib 1] [--rounds 3] [--dir /tmp]

Each round sends a file up and down through an application that does nothing else, and through ours:
in the parts that a plan names, and then the dataset's file by its signed URL. The servers run in
processes of their own. It prints seconds, the ratio of the medians, and by how much the memory of our
server's process grew.
"""

# ruff: noqa: ASYNC230, ASYNC240 - a bare copy, and a bench that nothing else shares
import argparse
import asyncio
import http.client
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from infra.http.server import HttpServer
from infra.operations.local import embedded_postgres
from infra.ports.actor import ROOT, ROOT_OWNER, Actor, acting_as
from infra.spine.postgres.migrate import migrate
from producers.serve import LIMITS
from schemas.artifact_refs import ArtifactRef
from schemas.events import DatasetRegistered
from schemas.specs import DatasetRef
from tests.kit.application import application

PIECE = 1 << 20
Conversation = Any


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Copy a body to a synced file, or a file to a body: what such a server does at least."""
    path = Path(scope["query_string"].decode())
    if scope["method"] == "PUT":
        with path.open("wb") as file:
            more = True
            while more:
                message = await receive()
                file.write(message.get("body", b""))
                more = message.get("more_body", False)
            await asyncio.to_thread(os.fsync, file.fileno())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        return
    size = str(path.stat().st_size).encode()
    headers = [(b"content-length", size)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, PIECE):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _serve(app: Any, told: Conversation, more: Callable[[], Any] | None = None) -> None:
    server = HttpServer(app, host="127.0.0.1", port=0, limits=LIMITS)
    await server.listen()
    serving = asyncio.ensure_future(server.serve())
    told.send(server.port)
    while (asked := await asyncio.to_thread(told.recv)) is not None:
        if asked == "memory":
            told.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        elif more is not None:
            told.send(await more(*asked))
    server.stop()
    await serving


def serve_bare(told: Conversation) -> None:
    asyncio.run(_serve(bare, told))


def serve_ours(told: Conversation, url: str, home: Path) -> None:
    asyncio.run(_ours(told, url, home))


async def _ours(told: Conversation, url: str, home: Path) -> None:
    async with application(url, home) as app:
        transfers = app.services.transfers

        async def plan(size: int, address: str) -> tuple[str, list[tuple[str, int]]]:
            with acting_as(Actor(ROOT, ROOT_OWNER, frozenset({"admin"}))):
                upload = await transfers.begin("bench", size)
                found = await transfers.plan(upload, address=address)
            return upload.id, [(part.url, part.size) for part in found.parts]

        async def close(upload: str) -> None:
            await transfers.uploads.close(upload)

        async def link(file: Path, address: str) -> str:
            uri = await app.services.blobs.put_file("datasets/bench", file)
            ref = ArtifactRef(uri=uri, sha256="0" * 64, size=file.stat().st_size)
            dataset = DatasetRef(dataset="bench", name="bench", content=ref, num_rows=4)
            await app.append(
                [
                    DatasetRegistered(
                        dataset=dataset, columns=(), file_name="f", file_size=1, original=ref
                    )
                ]
            )
            with acting_as(Actor(ROOT, ROOT_OWNER, frozenset({"admin"}))):
                return (await transfers.download_url("/datasets/bench", "f", address=address)).url

        async def more(what: str, *arguments: Any) -> Any:
            return await {"plan": plan, "link": link, "close": close}[what](*arguments)

        await _serve(app.app, told, more)


@contextmanager
def process(target: Any, *arguments: Any) -> Iterator[tuple[Conversation, str]]:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *arguments))
    child.start()
    yield ours, f"http://127.0.0.1:{ours.recv()}"
    ours.send(None)
    child.join()


def put(
    url: str, file: Path, start: int, size: int, connection: http.client.HTTPConnection
) -> None:
    parts = urlsplit(url)
    connection.putrequest("PUT", f"{parts.path}?{parts.query}")
    connection.putheader("Content-Length", str(size))
    connection.endheaders()
    with file.open("rb") as source:
        connection.sock.sendfile(source, start, size)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body


def send(urls: list[tuple[str, int]], file: Path) -> float:
    began, start = time.perf_counter(), 0
    connection = http.client.HTTPConnection(urlsplit(urls[0][0]).netloc)
    for url, size in urls:
        put(url, file, start, size, connection)
        start += size
    return time.perf_counter() - began


def get(url: str) -> float:
    began, size, parts = time.perf_counter(), 0, urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc)
    connection.request("GET", f"{parts.path}?{parts.query}")
    answer, room = connection.getresponse(), bytearray(PIECE)
    while count := answer.readinto(room):
        size += count
    assert answer.status == 200
    assert size
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path("/tmp"))  # noqa: S108 - a choice of the user
    chosen = parser.parse_args()
    size, folder = int(chosen.gib * (1 << 30)), chosen.dir
    file, copy = folder / "transfers.bin", folder / "transfers.copy"
    with file.open("wb") as made:
        for _ in range(size >> 20):
            made.write(os.urandom(1 << 20))
    seconds: dict[str, list[float]] = {}
    postgres = embedded_postgres.start(folder / "transfers-postgres")
    asyncio.run(migrate(postgres.url))
    with (
        process(serve_bare) as (_, bare_url),
        process(serve_ours, postgres.url, folder / "transfers-home") as (told, url),
    ):
        told.send(("link", file, url))
        link = told.recv()
        told.send("memory")
        before = told.recv()
        for _ in range(chosen.rounds):
            told.send(("plan", size, url))
            upload, plan = told.recv()
            copies = [(f"{bare_url}/?{copy}.{n}", part) for n, (_, part) in enumerate(plan)]
            for name, spent in (
                ("up, bare", send(copies, file)),
                ("up, ours", send(plan, file)),
                ("down, bare", get(f"{bare_url}/?{file}")),
                ("down, ours", get(link)),
            ):
                seconds.setdefault(name, []).append(spent)
            for n in range(len(plan)):
                Path(f"{copy}.{n}").unlink()
            told.send(("close", upload))  # so that both sides write to memory that is as warm
            told.recv()
        told.send("memory")
        grown = (told.recv() - before) >> 10
    for name, taken in seconds.items():
        print(f"{name:12} {statistics.median(taken):6.2f} s  {[round(s, 2) for s in taken]}")
    for way in ("up", "down"):
        medians = [statistics.median(seconds[f"{way}, {which}"]) for which in ("bare", "ours")]
        print(f"{way:12} {medians[0] / medians[1]:6.2f} x the speed of the bare copy")
    print(f"memory       {grown:6d} MiB more")
    file.unlink()
    postgres.stop()


if __name__ == "__main__":
    main()
