"""The file of an archived run: a gzipped tar that is written and read as a stream.

    archive.json            {"format": 1, "run": "..."}; the first member
    events/000001.jsonl     one page of events in the log's order, one JSON object per line
    rows/<sha256>           small artifacts, which are otherwise stored in the database
    blobs/<key>             blobs of the run, under the keys that they have in the store
    end.json                {"events": 12, "artifacts": 3}; the last member, which a truncated file lacks

An artifact comes before the first page of events that names it. With the same version of zlib, the same
history gives the same bytes, because the tar records no times and no owners. At most one page or one
small artifact is in memory at a time.
"""

import contextlib
import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from schemas.errors import CorruptData

FORMAT = 1
HEAD, END = "archive.json", "end.json"
EVENTS, ROWS, BLOBS = "events", "rows", "blobs"


class ArchiveWriter:
    """Writes an archive into the file at `path`. Every method blocks, so call it in a thread."""

    def __init__(self, path: Path, run: str) -> None:
        self._file = path.open("wb")
        self._gzip = gzip.GzipFile(fileobj=self._file, mode="wb", compresslevel=6, mtime=0)
        self._tar = tarfile.open(fileobj=self._gzip, mode="w|")  # noqa: SIM115 - closed in `close`
        self._pages = 0
        self.events = 0
        self.artifacts = 0
        self._add(HEAD, _json({"format": FORMAT, "run": run}))

    def page(self, events: list[Mapping[str, Any]]) -> None:
        """Write a page of events."""
        self._pages += 1
        self.events += len(events)
        self._add(f"{EVENTS}/{self._pages:06}.jsonl", b"".join(_json(event) for event in events))

    def row(self, sha256: str, data: bytes) -> None:
        """Write a small artifact."""
        self.artifacts += 1
        self._add(f"{ROWS}/{sha256}", data)

    def blob(self, key: str, path: Path) -> None:
        """Write a blob, whose bytes are in the file at `path`."""
        self.artifacts += 1
        with path.open("rb") as file:
            self._tar.addfile(_info(f"{BLOBS}/{key}", path.stat().st_size), file)

    def close(self) -> None:
        """Write the last member and close the file. The archive is then complete."""
        self._add(END, _json({"events": self.events, "artifacts": self.artifacts}))
        self._tar.close()
        self._gzip.close()
        self._file.close()

    def abandon(self) -> None:
        """Close the file, whether it is complete or not. Errors while the buffers are written are
        ignored. Does nothing after `close`."""
        with contextlib.suppress(OSError, ValueError):
            self._tar.close()
        with contextlib.suppress(OSError, ValueError):
            self._gzip.close()
        self._file.close()

    def _add(self, name: str, data: bytes) -> None:
        self._tar.addfile(_info(name, len(data)), io.BytesIO(data))


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive. Its `content` can be read until the next member is requested."""

    kind: str
    name: str
    content: IO[bytes]

    def events(self) -> list[dict[str, Any]]:
        """The events of a page."""
        return [json.loads(line) for line in self.content]


def members(path: Path, run: str) -> Iterator[Member]:
    """The pages, rows and blobs of the archive of `run`, in order. Raises CorruptData when the file is
    not an archive, belongs to another run, or is incomplete."""
    count = {EVENTS: 0, ROWS: 0, BLOBS: 0}
    try:
        with gzip.open(path) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as tar:
            for position, info in enumerate(tar):
                content = tar.extractfile(info)
                if content is None:
                    raise CorruptData(f"{path} holds {info.name}, which is not a file")
                if position == 0:
                    _check_head(info.name, content, run)
                elif info.name == END:
                    return
                else:
                    kind, _, name = info.name.partition("/")
                    if kind not in count or not name:
                        raise CorruptData(f"{path} holds {info.name}, which no archive has")
                    yield Member(kind, name, content)
    except (OSError, EOFError, tarfile.TarError, zlib.error, ValueError) as error:
        raise CorruptData(f"{path} is not an archive that can be read: {error}") from error
    raise CorruptData(f"{path} is not whole: it has no {END}")


def _check_head(name: str, content: IO[bytes], run: str) -> None:
    head = json.loads(content.read()) if name == HEAD else {}
    if head.get("format") != FORMAT:
        raise CorruptData(
            f"the archive has format {head.get('format')!r}; this version of Headrace reads {FORMAT}"
        )
    if head.get("run") != run:
        raise CorruptData(f"the archive is of run {head.get('run')}, not of {run}")


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


def _info(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    return info
