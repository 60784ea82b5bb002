"""A file read once into memory of one's own, and hashed as it comes: what is verified is what is used.

Mapping the file instead would save the copy, but what lies in the file may change after it was verified.
"""

import hashlib
import mmap
from collections.abc import Callable
from pathlib import Path

from schemas.errors import CorruptData, NotFound
from schemas.sampling import ArtifactRef

PIECE_BYTES = 1 << 18
"""What was just copied is still in the processor's cache when it is hashed."""

HEAD_BYTES = 8
MOST_LEAD_BYTES = 64

Lead = Callable[[bytes], int]
"""How many bytes (at most MOST_LEAD_BYTES) to leave before a content, by its first HEAD_BYTES: a reader
that looks at parts of it without copying them may want those in places that suit it."""


def read_verified(path: Path, ref: ArtifactRef, lead: Lead) -> memoryview:
    """The content of `path`, writable; its memory begins `lead` bytes behind the start of a page. Raises
    NotFound, CorruptData when it is not what `ref` promises."""
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
        raise NotFound(f"the artifact {ref.uri} is gone") from error
    if not whole or digest.hexdigest() != ref.sha256:
        raise CorruptData(
            f"{ref.uri} does not hold what was recorded: {ref.size} bytes with sha256 {ref.sha256}"
        )
    return content
