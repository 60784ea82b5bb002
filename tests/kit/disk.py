"""A small disk that a test may fill. Mounting it needs a privilege. Without it the test is skipped with
a message that names the privilege."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PIECE_BYTES = 64 << 10


@contextmanager
def small_disk(place: Path, *, size_mb: int) -> Iterator[Path]:
    """Mount a file system of `size_mb` MiB at `place` until the block ends."""
    place.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root (CAP_SYS_ADMIN)")
    options = f"size={size_mb}m,mode=0755"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        said = mounted.stderr.decode().strip()
        pytest.skip(f"a small tmpfs cannot be mounted here, CAP_SYS_ADMIN is missing: {said}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill the disk until the block ends."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        try:
            with suppress(OSError):
                while file.write(bytes(PIECE_BYTES)):
                    pass
            yield
        finally:
            filler.unlink()
