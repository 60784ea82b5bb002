"""Reads what a fetched commit holds: all files as a tar, one file, its message, and its differences.

Every read is bounded before anything is kept, because the repository is not trusted.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from infra.repositories.git.process import run_git
from infra.repositories.git.tree import LONGEST_PATH, Archive, Listing
from schemas.errors import Refused

MOST_CHANGED = 20_000
"""The maximum number of paths in which two commits may differ before all paths count as changed."""

LONGEST_MESSAGE = 64 << 10
PLAIN = ("100644", "100755")
LINKS = ("120000", "160000")
KINDS = {"120000": "a symbolic link", "160000": "a submodule", "040000": "a directory"}


async def read_tar(mirror: Path, sha: str) -> bytes:
    """Return all files of a commit. Raises GitFailed, CorruptData, and Refused for a tree that is not
    allowed."""
    listing = Listing()
    await run_git(
        "ls-tree", "-r", "-t", "-z", "-l", "--full-tree", sha, where=mirror, sink=listing.feed
    )
    archive = Archive(listing.entries)
    wanted = b"".join(f"{entry.blob}\n".encode() for entry in listing.entries)
    await run_git("cat-file", "--batch", where=mirror, send=wanted, sink=archive.feed)
    return await asyncio.to_thread(archive.close)


async def read_file(mirror: Path, sha: str, path: str, *, most: int) -> bytes | None:
    """Return a regular file of a commit, or None when there is none. Its size is known before it is
    read. Raises Refused when the path, or a directory of it, is a symbolic link or a submodule, when
    it is not a path inside of the repository, and when the file has more than `most` bytes."""
    parts = path.split("/")
    if (
        any(part in ("", ".", "..") for part in parts)
        or len(path.encode(errors="replace")) > LONGEST_PATH
        or not path.isprintable()
        or "\\" in path
    ):
        raise Refused(f"{path[:120]!r} is not a path inside the repository; name a file of it")
    found = await _entry(mirror, sha, path)
    if found is None:
        await _refuse_links(mirror, sha, parts)
        return None
    mode, blob, size = found
    if mode not in PLAIN:
        raise Refused(f"{path} is {KINDS.get(mode, 'no plain file')}; commit the file itself")
    if size > most:
        raise Refused(f"{path} has {size} bytes, more than {most}; shorten it")
    return await run_git("cat-file", "blob", blob, where=mirror)


async def _refuse_links(mirror: Path, sha: str, parts: Sequence[str]) -> None:
    """Raises Refused when a directory of a path is a symbolic link or a submodule."""
    for depth in range(1, len(parts)):
        prefix = "/".join(parts[:depth])
        found = await _entry(mirror, sha, prefix)
        if found is None:
            return
        if found[0] in LINKS:
            kind = KINDS[found[0]]
            raise Refused(f"{prefix} is {kind}; commit the directory itself")


async def _entry(mirror: Path, sha: str, path: str) -> tuple[str, str, int] | None:
    """The mode, id and size of one entry of a commit's tree."""
    said = await run_git(
        "--literal-pathspecs", "ls-tree", "-z", "-l", "--full-tree", sha, "--", path, where=mirror
    )
    for line in said.split(b"\0"):
        head, _, name = line.partition(b"\t")
        if name == path.encode():
            mode, _, blob, size = head.decode().split()
            return mode, blob, int(size) if size.isdigit() else 0
    return None


async def read_message(mirror: Path, sha: str) -> str:
    """Return the beginning of a commit's message."""
    kept = bytearray()

    def keep(chunk: bytes) -> None:
        kept.extend(chunk[: LONGEST_MESSAGE - len(kept)])

    await run_git(
        "log", "-1", "--no-show-signature", "--encoding=UTF-8", "--format=%B", sha, "--",
        where=mirror, sink=keep,
    )  # fmt: skip
    return kept.decode(errors="replace").strip()


class _Paths:
    """Takes the paths of `diff-tree -z` from its output, up to a limit."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\0")
        self.found += (line.decode(errors="replace") for line in lines)
        if len(self.found) > MOST_CHANGED or len(self._rest) > 4 * LONGEST_PATH:
            raise _TooMany


class _TooMany(Exception):
    """Two commits differ in too many paths, or in one that is too long."""


async def changed_paths(
    repository: Path, before: str, after: str, *, objects: Path | None = None
) -> tuple[str, ...] | None:
    """Return the paths in which two commits differ, or None when these are too many. `objects` is
    another repository that holds one of them."""
    paths = _Paths()
    try:
        await run_git(
            "diff-tree", "-r", "--name-only", "-z", "--no-renames", "--no-ext-diff", before, after,
            where=repository, objects=objects, sink=paths.feed,
        )  # fmt: skip
    except _TooMany:
        return None
    return tuple(paths.found)
