"""Answers of git's protocol, and packs, made byte by byte."""

import hashlib
import struct
import zlib
from collections.abc import Iterable

FLUSH, DELIMITER = b"0000", b"0001"
COMMIT, TREE, BLOB, TAG, OFS_DELTA, REF_DELTA = 1, 2, 3, 4, 6, 7


def packet(data: bytes | str) -> bytes:
    raw = data.encode() if isinstance(data, str) else data
    return b"%04x%s" % (len(raw) + 4, raw)


def advertisement(*capabilities: str) -> bytes:
    """The first answer of a server of protocol version 2."""
    told = capabilities or (
        "agent=x",
        "ls-refs=unborn",
        "fetch=shallow filter",
        "object-format=sha1",
    )
    lines = b"".join(packet(f"{one}\n") for one in ("version 2", *told))
    return packet("# service=git-upload-pack\n") + FLUSH + lines + FLUSH


def listing(*lines: str) -> bytes:
    return b"".join(packet(f"{line}\n") for line in lines) + FLUSH


def band(data: bytes, *, number: int = 1) -> bytes:
    """Data in packets of a side band: 1 is the pack, 2 are messages, 3 are errors."""
    size = 60_000
    parts = (data[at : at + size] for at in range(0, len(data), size))
    return b"".join(packet(bytes([number]) + part) for part in parts)


def transfer(pack: bytes) -> bytes:
    """The answer to a fetch: a whole pack."""
    return packet("packfile\n") + band(pack) + FLUSH


def entry(kind: int, data: bytes, *, size: int | None = None, between: bytes = b"") -> bytes:
    """An object of a pack. `size` is what its head claims."""
    return head(kind, len(data) if size is None else size) + between + zlib.compress(data, 1)


def head(kind: int, size: int) -> bytes:
    first, size = (kind << 4) | (size & 15), size >> 4
    made = bytearray()
    while size:
        made.append(first | 0x80)
        first, size = size & 0x7F, size >> 7
    return bytes([*made, first])


def beginning(count: int) -> bytes:
    return b"PACK" + struct.pack(">II", 2, count)


def pack(
    entries: Iterable[bytes], *, count: int | None = None, trailer: bytes | None = None
) -> bytes:
    """A pack with a correct trailer, unless another one is given."""
    given = list(entries)
    body = beginning(len(given) if count is None else count) + b"".join(given)
    return body + (trailer or hashlib.sha1(body, usedforsecurity=False).digest())


def number(value: int) -> bytes:
    """A size as deltas have it."""
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def growing_delta(size: int) -> bytes:
    """A delta whose result is its base twice."""
    copy = bytes([0x80 | 0x0F | 0x70]) + struct.pack("<I", 0) + struct.pack("<I", size)[:3]
    return number(size) + number(2 * size) + copy * 2


def bomb_of_deltas() -> bytes:
    """A chain of deltas, each of which doubles the one before: 8 TiB out of some kilobytes."""
    base = bytes(1 << 20)
    made, size = [entry(BLOB, base)], len(base)
    for _ in range(3):
        delta = growing_delta(size)
        made.append(entry(OFS_DELTA, delta, between=offset(len(made[-1]))))
        size *= 2
    claim = number(size) + number(1 << 43) + b"\x01x"
    made.append(entry(OFS_DELTA, claim, between=offset(len(made[-1]))))
    return pack(made)


def offset(back: int) -> bytes:
    made = bytearray([back & 0x7F])
    while back := back >> 7:
        back -= 1
        made.insert(0, back & 0x7F | 0x80)
    return bytes(made)


def ring_of_deltas() -> bytes:
    """Two deltas, each of which names the other as its base."""
    ids = (b"\x11" * 20, b"\x22" * 20)
    delta = number(1) + number(1) + b"\x01x"
    return pack(entry(REF_DELTA, delta, between=one) for one in ids)


def inflating_blob(megabytes: int) -> bytes:
    """A file of zeros, which takes a thousandth of its size."""
    packer = zlib.compressobj(9)
    body = b"".join(packer.compress(bytes(1 << 20)) for _ in range(megabytes)) + packer.flush()
    return pack([head(BLOB, megabytes << 20) + body])
