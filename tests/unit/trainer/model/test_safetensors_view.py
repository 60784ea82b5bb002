"""Tensors mapped in place from a file equal those of the library, are aligned, and no other kind of
file is accepted."""

import json
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load, save

from schemas.artifact_refs import ArtifactRef
from schemas.errors import CorruptData
from tests.unit.trainer.support import Shelf, job, request
from trainer.engine import Engine
from trainer.model.safetensors_view import ALIGNED_BYTES, alignment_padding, view_tensors
from trainer.policy import parse

CPU = torch.device("cpu")
TENSORS = {
    "wide": torch.randn(7, 16),
    "odd": torch.randn(3, 5),
    "after": torch.randn(4, 4),
    "half": torch.randn(9).bfloat16(),
    "whole": torch.arange(5),
    "flag": torch.arange(3, dtype=torch.uint8),
    "none": torch.empty(0, 4),
    "one": torch.tensor(2.5),
}


def placed(data: bytes) -> memoryview:
    """Place the file as `infra.blobs.verified_read` does: in aligned memory, after the lead."""
    room = torch.empty(len(data) + 2 * ALIGNED_BYTES, dtype=torch.uint8).numpy()
    first = -room.ctypes.data % ALIGNED_BYTES + alignment_padding(data[:8])
    content = memoryview(cast("Any", room))[first : first + len(data)]
    content[:] = data
    return content


def test_they_are_what_the_library_reads() -> None:
    data = save(TENSORS, metadata={"format": "pt"})
    found, expected = parse(placed(data), device=CPU), load(data)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert found[name].data_ptr() % ALIGNED_BYTES == 0


def test_only_unaligned_tensors_are_copied() -> None:
    data = placed(save({"a": torch.zeros(16), "b": torch.zeros(3), "c": torch.zeros(16)}))
    found = view_tensors(data)
    data[8 + int.from_bytes(data[:8], "little") :] = b"\xff" * (4 * 35)
    assert found["a"].isnan().all(), "it lies in the file"
    assert found["b"].isnan().all()
    assert not found["c"].any(), "12 bytes behind an aligned place"


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 64


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage that is no file of tensors",
        (1 << 62).to_bytes(8, "little") + b"{}",
        header(a=7),
        header(a={"dtype": "F31", "shape": [4], "data_offsets": [0, 16]}),
        header(a={"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}),
        header(a={"dtype": "F32", "shape": [17], "data_offsets": [0, 68]}),
        header(a={"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}),
        header(a={"dtype": "F32", "shape": ["x"], "data_offsets": [0, 16]}),
        header(a={"dtype": "F32", "shape": [4], "data_offsets": [16]}),
        header(a={"dtype": "F32", "shape": [4]}),
    ],
)
def test_anything_else_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptData, match="not a safetensors file"):
        parse(memoryview(bytearray(data)), device=CPU)


async def test_a_version_read_in_place_samples_the_same() -> None:
    shelf, read = Shelf(), list[ArtifactRef]()

    async def in_memory_of_its_own(ref: ArtifactRef, lead: object) -> memoryview:
        read.append(ref)
        return placed(shelf.fetch(ref))

    learner, sampler = (
        Engine(fetch=shelf.fetch, threads=1),
        Engine(fetch=shelf.fetch, read=in_memory_of_its_own, threads=1),
    )
    first = await learner.learner.initialize(job())
    policy = shelf.policy(first.state)
    turns = [await e.sampler.sample(request(policy=policy)) for e in (learner, sampler)]
    assert turns[0] == turns[1]
    assert read == [policy.weights]
    for engine in (learner, sampler):
        await engine.aclose()
