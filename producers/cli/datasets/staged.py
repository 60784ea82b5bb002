"""Uploads a dataset in parts, which are sent again alone when one is lost. An upload that was
interrupted goes on where it stopped."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from producers.cli.client import Client, path_segment
from producers.cli.display.output import Document
from producers.cli.errors import Failure
from schemas.errors import Issue

LARGE_BYTES = 64 << 20
"""Files that are larger are sent in parts."""

PIECE_BYTES = 1 << 20
TRIES = 5
LOOK_EVERY_S = 0.3
ISSUES_SHOWN = 20


def upload_in_stages(
    client: Client,
    file: Path,
    stream: BinaryIO,
    name: str,
    *,
    mapping: Mapping[str, str] | None,
    overwrites: bool,
) -> Document:
    """Send a file, and wait for its check. Returns the dataset. Raises Failure."""
    begun = client.post(
        "/datasets",
        {
            "name": name,
            "file_name": file.name,
            "file_size": file.stat().st_size,
            "sha256": file_digest(file),
            "overwrite": overwrites,
            **({"mapping": mapping} if mapping else {}),
        },
    )
    found: Document = begun["dataset"]
    if begun["upload"] is None:
        return found
    upload = path_segment(str(found["id"]))
    parts = send_parts(
        client,
        stream,
        begun["upload"],
        renew=lambda: client.get(f"/datasets/{upload}/upload")["upload"],
    )
    client.post(f"/datasets/{upload}/complete", {"parts": parts})
    return _wait_for_check(client, upload, file.name)


def send_parts(
    client: Client, stream: BinaryIO, plan: Document, *, renew: Callable[[], Document]
) -> list[Document]:
    """Send the parts of a file that have not arrived, and return the number and the ETag of each.
    `renew` asks for the plan again when its URLs expired while others were sent. Raises Failure."""
    sent: list[Document] = []
    for number in range(len(plan["parts"])):
        try:
            sent.append(_send_part(client, stream, [*_with_starts(plan)][number]))
        except Failure as failure:
            if failure.code != "SIGNED_URL":
                raise
            plan = renew()
            sent.append(_send_part(client, stream, [*_with_starts(plan)][number]))
    return sent


def _with_starts(plan: Document) -> Iterator[Document]:
    for part in plan["parts"]:
        yield {**part, "start": (part["part_number"] - 1) * plan["part_size"]}


def _send_part(client: Client, stream: BinaryIO, part: Document) -> Document:
    """Send a part unless it has arrived. Returns its number and its ETag."""
    etag, pause_s = part.get("etag"), 0.5
    for attempt in range(TRIES if etag is None else 0):
        stream.seek(part["start"])
        try:
            etag = client.put_signed(part["url"], _pieces(stream, part["size"]), part["size"])
            break
        except Failure as failure:
            if failure.code != "UNREACHABLE" or attempt == TRIES - 1:
                raise
        time.sleep(pause_s)
        pause_s *= 2
    return {"part_number": part["part_number"], "etag": etag}


def _pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    while size and (piece := stream.read(min(size, PIECE_BYTES))):
        size -= len(piece)
        yield piece


def _wait_for_check(client: Client, upload: str, file_name: str) -> Document:
    while True:
        found: Document = client.get(f"/datasets/{upload}")["dataset"]
        if found["status"] == "uploaded":
            return found
        if found["status"] in ("error", "cancelled"):
            lines = client.get(f"/datasets/{upload}/logs", {"limit": 200})["logs"]
            errors = [str(one["message"]) for one in lines if one["level"] == "error"]
            issues = tuple(Issue(*text.partition(" ")[::2]) for text in errors[:ISSUES_SHOWN])
            said = found.get("error") or f"the upload of {file_name} was aborted; start it again"
            raise Failure("VALIDATION", str(said), issues=issues)
        time.sleep(LOOK_EVERY_S)


def file_digest(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
