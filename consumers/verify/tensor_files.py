"""Compares two safetensors files tensor by tensor."""

import json

Tensor = tuple[str, tuple[int, ...], memoryview]
"""The dtype, the shape and the bytes of a tensor."""


def differing_tensors(ours: bytes, theirs: bytes) -> list[str]:
    """The names of the tensors whose dtype, shape or bytes differ, or that one of the files lacks.
    Nothing if one is not a safetensors file."""
    try:
        one, other = _read_tensors(ours), _read_tensors(theirs)
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def _read_tensors(data: bytes) -> dict[str, Tensor]:
    """The tensors by name. The first eight bytes of a file are the size of its header."""
    start = 8 + int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:start]), memoryview(data)[start:]
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], tuple(entry["shape"]), body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }
