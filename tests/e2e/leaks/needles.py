"""What a leaked secret looks like in bytes, also in parts and encoded. The product has no part in it."""

import base64
import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PART = 12
"""Characters of the random core of a secret that count as a leak."""


@dataclass(frozen=True)
class Needles:
    """Byte strings, any of which is a leak."""

    parts: tuple[bytes, ...]

    @classmethod
    def of(cls, *cores: str) -> "Needles":
        """Needles for the cores of secrets: random characters that no escape changes."""
        found: dict[bytes, None] = {}
        for core in cores:
            data = core.encode()
            for text in (data, data.hex().encode(), data.hex().upper().encode()):
                found |= dict.fromkeys(_windows(text, PART if text == data else 2 * PART))
            for offset in range(3):
                encoded = base64.b64encode(bytes(offset) + data)[4:-4]
                found |= dict.fromkeys(_windows(encoded, 16))
        return cls(tuple(found))

    def find(self, data: bytes) -> str | None:
        """Where a needle is in the data (or in what it is compressed from), or None."""
        for form in (data, _unpack(data)):
            for part in self.parts:
                if (place := form.find(part)) >= 0:
                    return form[max(0, place - 80) : place + 40].decode(errors="replace")
        return None

    def find_in_files(self, directory: Path) -> str | None:
        """The first leak in the names and contents of files, or None."""
        for path in sorted(directory.rglob("*")):
            if found := self.find(str(path).encode()):
                return found
            if path.is_file() and not path.is_symlink():
                try:
                    data = path.read_bytes()
                except OSError:  # it was removed meanwhile
                    continue
                if found := self.find(data):
                    return f"{path}: {found}"
        return None


def _windows(text: bytes, size: int) -> Iterator[bytes]:
    return (text[first : first + size] for first in range(len(text) - size + 1))


def _unpack(data: bytes) -> bytes:
    try:
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else b""
    except (OSError, EOFError, zlib.error):
        return b""
