"""The hash of named tensors: the root of a Merkle tree over them.

It is computed from the memory of the tensors, so nothing is serialised for it. Every hash is a SHA-256.
The tree is that of RFC 6962, and its leaves are the tensors in the order of their names:

    chunk: H(0x02, bytes)                       CHUNK_BYTES of a tensor, row by row, little-endian
    leaf:  H(0x00, size of head, head, chunks)  the head is the name, dtype and shape as JSON
    node:  H(0x01, left, right)

The first byte keeps a chunk, a leaf and a node from having the same hash. A large tensor has several
chunks, so threads share it. Neither their number nor the device changes the root.
"""

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch

LEAF, NODE, CHUNK = b"\x00", b"\x01", b"\x02"

CHUNK_BYTES = 4 << 20
"""A part of the hash: another size gives other roots."""


def merkle_root(tensors: Mapping[str, torch.Tensor]) -> str:
    """The root over these tensors, in hexadecimal. It uses as many threads as torch does."""
    return tree_root(leaf_hashes(tensors)).hex()


def leaf_hashes(tensors: Mapping[str, torch.Tensor]) -> list[bytes]:
    """The hash of each tensor, in the order of their names."""
    ordered = sorted(tensors.items())
    parts = [_divide(_flat_bytes(tensor)) for _, tensor in ordered]
    chunks = _hash_all([chunk for part in parts for chunk in part])
    return [
        _leaf_hash(name, tensor, islice(chunks, len(part)))
        for (name, tensor), part in zip(ordered, parts, strict=True)
    ]


def tree_root(hashes: Sequence[bytes]) -> bytes:
    """The root over the hashes of leaves. A hash without a partner moves up a level."""
    level = list(hashes) or [hashlib.sha256().digest()]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        nodes = [hashlib.sha256(NODE + left + right).digest() for left, right in pairs]
        level = nodes + level[2 * len(nodes) :]
    return level[0]


def _leaf_hash(name: str, tensor: torch.Tensor, chunks: Iterable[bytes]) -> bytes:
    dtype = str(tensor.dtype).removeprefix("torch.")
    head = json.dumps([name, dtype, list(tensor.shape)], separators=(",", ":")).encode()
    size = len(head).to_bytes(8, "little")
    return hashlib.sha256(b"".join((LEAF, size, head, *chunks))).digest()


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as a flat view, or as that of a copy if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _divide(content: torch.Tensor) -> Sequence[torch.Tensor]:
    """The chunks of a tensor. Most have one, and splitting takes half as long as hashing 10 kB."""
    return (content,) if content.numel() <= CHUNK_BYTES else content.split(CHUNK_BYTES)


def _hash_all(chunks: Sequence[torch.Tensor]) -> Iterator[bytes]:
    """The hashes of chunks, in order. Threads compute those of large tensors at the same time."""
    threads, batches = torch.get_num_threads(), list(_batches(chunks))
    if threads == 1 or len(batches) == 1:
        for batch in batches:
            yield from _hash_batch(batch)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
        waiting: deque[Future[list[bytes]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(_hash_batch, [chunk.cpu() for chunk in batch]))
            if len(waiting) > 2 * threads:  # a GPU's tensors are copied no faster than hashed
                yield from waiting.popleft().result()
        for future in waiting:
            yield from future.result()


def _batches(chunks: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Consecutive chunks together, because a thread should not start for a small one."""
    batch, size = [], 0
    for chunk in chunks:
        batch.append(chunk)
        size += chunk.numel()
        if size >= CHUNK_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _hash_batch(chunks: Iterable[torch.Tensor]) -> list[bytes]:
    return [_hash_chunk(chunk) for chunk in chunks]


def _hash_chunk(chunk: torch.Tensor) -> bytes:
    digest = hashlib.sha256(CHUNK)
    digest.update(chunk.cpu().numpy().data)
    return digest.digest()
