"""Reads a file once into private memory and hashes it on the way, so that the verified bytes are the
ones that are used.

Mapping the file would save the copy, but its content could change after it was verified.
"""

import hashlib
import mmap
from collections.abc import Callable
from pathlib import Path

from schemas.artifact_refs import ArtifactRef
from schemas.errors import CorruptData, NotFound

PIECE_BYTES = 1 << 18
"""Small enough that a copied piece is still in the processor's cache when it is hashed."""

HEAD_BYTES = 8
MOST_LEAD_BYTES = 64

Lead = Callable[[bytes], int]
"""How many bytes (at most MOST_LEAD_BYTES) to leave before a content, decided from its first HEAD_BYTES.
A reader that uses parts of the content without a copy can align them with it."""


def read_verified(path: Path, ref: ArtifactRef, lead: Lead) -> memoryview:
    """The content of `path`, writable, beginning `lead` bytes after the start of a page. Raises
    NotFound, and CorruptData when it is not what `ref` names."""
    room = mmap.mmap(-1, ref.size + MOST_LEAD_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            first = lead(file.read(HEAD_BYTES) or b"")
            content = memoryview(room)[first : first + ref.size]
            file.seek(0)
            at = 0
            while num := file.readinto(content[at : at + PIECE_BYTES]):
                digest.update(content[at : at + num])
                at += num
            whole = at == ref.size and not file.read(1)
    except FileNotFoundError as error:
        raise NotFound(
            f"artifact {ref.uri} does not exist any more; bring it back from a backup"
        ) from error
    if not whole or digest.hexdigest() != ref.sha256:
        raise CorruptData(
            f"{ref.uri} does not hold the recorded {ref.size} bytes with sha256 {ref.sha256}; bring "
            "it back from a backup"
        )
    return content
