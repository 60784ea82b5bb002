"""A file that is read in place is private, verified as a whole, and at the address that was asked
for."""

import ctypes
from pathlib import Path

import pytest

from infra.blobs.artifacts import ArtifactStore
from infra.blobs.local import LocalBlobs
from infra.blobs.memory import MemoryBlobs
from infra.blobs.verified_read import PIECE_BYTES, read_verified
from infra.spine.memory.event_log import MemoryLog, World
from schemas.artifact_refs import ArtifactRef
from schemas.errors import CorruptData, NotFound

CONTENT = bytes(range(251)) * (3 * PIECE_BYTES // 251)
"""Some pieces and a bit."""


async def put(root: Path, data: bytes) -> tuple[ArtifactStore, ArtifactRef, Path]:
    """A store that has just started, an artifact in it, and the place of the artifact's bytes."""
    blobs = LocalBlobs(root)
    ref = await ArtifactStore(MemoryLog(World()), blobs).put_artifact(data, run="r", blob=True)
    path = await blobs.file(ref.uri)
    assert path is not None
    return ArtifactStore(MemoryLog(World()), blobs), ref, path


@pytest.mark.parametrize("content", [CONTENT, b"short", b""])
async def test_it_is_the_callers_own_copy(tmp_path: Path, content: bytes) -> None:
    store, ref, path = await put(tmp_path, content)
    found = await store.read(ref, lambda head: 3)
    assert isinstance(found, memoryview)
    assert not found.readonly
    path.write_bytes(b"\0" * len(content))
    assert found == content
    if content:
        address = ctypes.addressof(ctypes.c_char.from_buffer(found))
        assert address % 64 == 3


async def test_the_place_is_told_by_the_first_bytes(tmp_path: Path) -> None:
    _, ref, path = await put(tmp_path, CONTENT)
    heads: list[bytes] = []

    def address_of(head: bytes) -> int:
        heads.append(head)
        return 0

    read_verified(path, ref, address_of)
    assert heads == [CONTENT[:8]]


@pytest.mark.parametrize(
    "damaged", [CONTENT[:-1], CONTENT + b"\0", CONTENT[:-1] + b"\xff", b"\xff" + CONTENT[1:], b""]
)
async def test_a_blob_that_differs_from_its_record_is_refused(
    tmp_path: Path, damaged: bytes
) -> None:
    store, ref, path = await put(tmp_path, CONTENT)
    path.write_bytes(damaged)
    with pytest.raises(CorruptData, match=f"{len(CONTENT)} bytes with sha256"):
        await store.read(ref, lambda head: 0)


async def test_a_blob_that_is_gone_is_not_found(tmp_path: Path) -> None:
    store, ref, path = await put(tmp_path, CONTENT)
    path.unlink()
    with pytest.raises(NotFound):
        await store.read(ref, lambda head: 0)


async def test_reads_without_a_local_file_return_the_content(tmp_path: Path) -> None:
    afar = ArtifactStore(MemoryLog(World()), MemoryBlobs())
    ref = await afar.put_artifact(CONTENT, run="r", blob=True)
    assert await afar.read(ref, lambda head: 0) == CONTENT
    near = ArtifactStore(MemoryLog(World()), LocalBlobs(tmp_path))
    ref = await near.put_artifact(CONTENT, run="r", blob=True)
    assert isinstance(await near.read(ref, lambda head: 0), bytes)
