"""The tensors of a safetensors file as views of its memory, without a copy where they are aligned.

Kernels choose their code path by alignment, and another path gives other bits. So a tensor that is not
aligned as torch would have aligned it is copied.
"""

import json
import math

import torch

ALIGNED_BYTES = 64
"""The alignment of memory that torch allocates."""

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}


def alignment_padding(head: bytes) -> int:
    """How many bytes to leave free before a file that begins with `head`, so that its tensors are
    aligned. The first eight bytes of the file give the length of its header."""
    return -(8 + int.from_bytes(head[:8], "little")) % ALIGNED_BYTES


def view_tensors(data: memoryview) -> dict[str, torch.Tensor]:
    """The tensors of a file in writable memory, which they keep alive. Raises ValueError when it is not
    a safetensors file, or has tensors of an unknown type."""
    start = 8 + int.from_bytes(data[:8], "little")
    if start > len(data):
        raise ValueError("its header is longer than the file")
    try:
        header = json.loads(bytes(data[8:start]))
        header.pop("__metadata__", None)
        return {name: _tensor(data[start:], **entry) for name, entry in header.items()}
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"its header does not say what tensors it holds: {error!r}") from error


def _tensor(
    body: memoryview, dtype: str, shape: list[int], data_offsets: tuple[int, int]
) -> torch.Tensor:
    kind, count = TYPES[dtype], math.prod(shape)
    begin, end = data_offsets
    if not 0 <= begin <= end <= len(body) or end - begin != count * kind.itemsize:
        raise ValueError(f"{count} elements of {dtype} do not lie at {begin} to {end}")
    if count == 0:
        return torch.empty(shape, dtype=kind)
    tensor = torch.frombuffer(body, dtype=kind, count=count, offset=begin).view(shape)
    return tensor if tensor.data_ptr() % ALIGNED_BYTES == 0 else tensor.clone()
