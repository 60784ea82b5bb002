"""Downloads: artifacts and dataset files. Large ones are streamed."""

import asyncio
import re
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from producers.core.datasets.recent_statistics import open_stored
from producers.http.responses import problem
from producers.http.routes.runs import services
from schemas.artifact_refs import ArtifactRef

WHOLE_BYTES = 4 << 20
"""Files up to this size are read, verified and sent. Larger files are streamed unverified, and the
client verifies their hash."""

RANGE = re.compile(r"bytes=(?P<first>[0-9]{0,15})-(?P<last>[0-9]{0,15})")
"""One range of bytes, as the header Range names it."""


async def download(request: Request, ref: ArtifactRef, file_name: str) -> Response:
    """The bytes of `ref` as a download with this file name. Raises NotFound when they are not stored,
    and CorruptData when a file that is small enough to be verified does not match its hash."""
    disposition = f"attachment; filename*=utf-8''{quote(Path(file_name).name)}"
    headers = {"Content-Disposition": disposition, "ETag": f'"{ref.sha256}"'}
    kind = "application/octet-stream"
    path = await services(request).blobs.file(ref.uri)
    if path is not None and ref.size > WHOLE_BYTES:
        (await asyncio.to_thread(open_stored, path)).close()
        return FileResponse(path, media_type=kind, headers=headers)
    if ref.size > WHOLE_BYTES:
        stream = await first_chunk_checked(services(request).blobs.chunks(ref.uri))
        headers["Content-Length"] = str(ref.size)
        return StreamingResponse(stream, media_type=kind, headers=headers)
    data = await services(request).artifacts.get_artifact(ref)
    return Response(data, media_type=kind, headers=headers)


async def first_lines(request: Request, ref: ArtifactRef, count: int) -> list[bytes]:
    """The first `count` lines of a file. A large file is not read completely. Raises NotFound when it is
    not stored."""
    path = await services(request).blobs.file(ref.uri)
    if path is not None:
        return await asyncio.to_thread(_read_head, path, count)
    found: list[bytes] = []
    async for line in _read_lines(request, ref):
        found.append(line)
        if len(found) >= count:
            break
    return found


async def select_lines(request: Request, ref: ArtifactRef, numbers: set[int]) -> dict[int, bytes]:
    """The lines of a file with these numbers (from 0), by number. Other lines do not stay in memory.
    Raises NotFound when the file is not stored."""
    path = await services(request).blobs.file(ref.uri)
    if path is not None:
        return await asyncio.to_thread(_select_lines, path, numbers)
    found: dict[int, bytes] = {}
    number, last = 0, max(numbers, default=-1)
    async for line in _read_lines(request, ref):
        if number in numbers:
            found[number] = line
        if number >= last:
            break
        number += 1
    return found


async def first_chunk_checked(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same stream, with its first chunk already read. So a missing file raises its error here,
    before a status of 200 is sent."""
    head = await anext(stream, b"")

    async def all_chunks() -> AsyncIterator[bytes]:
        yield head
        async for piece in stream:
            yield piece

    return all_chunks()


async def _read_lines(request: Request, ref: ArtifactRef) -> AsyncIterator[bytes]:
    """The lines of a file, without line endings. A small file is verified."""
    core = services(request)
    if ref.size <= WHOLE_BYTES:
        for line in (await core.artifacts.get_artifact(ref)).splitlines():
            yield line
        return
    begin: list[bytes] = []
    async for piece in core.blobs.chunks(ref.uri):
        first, *more = piece.split(b"\n")
        begin.append(first)
        for line in more:
            yield b"".join(begin)
            begin = [line]
    if any(begin):
        yield b"".join(begin)


def _select_lines(path: Path, numbers: set[int]) -> dict[int, bytes]:
    with open_stored(path) as file:
        last = islice(enumerate(file), max(numbers, default=-1) + 1)
        return {number: line for number, line in last if number in numbers}


def _read_head(path: Path, count: int) -> list[bytes]:
    with open_stored(path) as file:
        return [line for _, line in zip(range(count), file, strict=False)]


async def download_range(request: Request, ref: ArtifactRef, file_name: str) -> Response:
    """The bytes of `ref`, or the range of them that the request asks for, as a download with this file
    name. The ETag is their SHA-256. Raises NotFound when they are not stored."""
    headers = {
        "Content-Disposition": f"attachment; filename*=utf-8''{quote(Path(file_name).name)}",
        "ETag": f'"{ref.sha256}"',
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    span, status = _span_of(request, ref), 206
    if span is None:
        span, status = range(ref.size), 200
    elif not span:
        detail = f"the file has {ref.size} bytes; ask for a range inside of it"
        return problem(416, "RANGE", detail, headers={"Content-Range": f"bytes */{ref.size}"})
    else:
        headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{ref.size}"
    headers["Content-Length"] = str(len(span))
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    chunks = services(request).blobs.chunks(ref.uri, start=span.start, stop=span.stop)
    return StreamingResponse(await first_chunk_checked(chunks), status, headers)


def _span_of(request: Request, ref: ArtifactRef) -> range | None:
    """The bytes that a request asks for; empty when there are none of them, and None for all. Several
    ranges at once are answered with the whole file, as RFC 9110 allows."""
    match = RANGE.fullmatch(request.headers.get("range", "").strip())
    if match is None or request.headers.get("if-range", f'"{ref.sha256}"') != f'"{ref.sha256}"':
        return None
    first, last = match["first"], match["last"]
    if first:
        stop = min(int(last) + 1, ref.size) if last else ref.size
        return None if last and int(last) < int(first) else range(int(first), stop)
    return range(max(0, ref.size - int(last)), ref.size) if last else None
