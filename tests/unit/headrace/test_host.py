"""The host takes the buffers of its reads from memory that it keeps."""

import ctypes
import subprocess
import sys

import pytest

from tests.kit.platform import ROOT

BUFFERS = 64
ALLOCATE = f"""
import ctypes
from headrace import host

class Mallinfo(ctypes.Structure):
    _fields_ = [(f"n{{{{n}}}}", ctypes.c_int) for n in range(10)]  # the fourth counts mappings

mallinfo = ctypes.CDLL(None).mallinfo
mallinfo.restype = Mallinfo
{{first}}
before = mallinfo().n3
buffers = [bytes(256 << 10) for _ in range({BUFFERS})]
print(mallinfo().n3 - before)
"""
needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo"), reason="this C library does not count mappings"
)


def mappings(first: str) -> int:
    """How many of the buffers got a mapping of their own."""
    ran = subprocess.run(
        [sys.executable, "-c", ALLOCATE.format(first=first)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    )
    return int(ran.stdout)


@needs_glibc
def test_a_buffer_of_a_read_is_not_mapped() -> None:
    assert mappings("host.keep_freed_memory()") == 0


@needs_glibc
def test_twin_otherwise_it_is() -> None:
    assert mappings("") > BUFFERS / 2
