"""A process beside the sandbox, of the same user: a neighbour with a secret in its memory, in its
environment and in its files. It answers each line with the state of its memory."""

import ctypes
import os
import sys
from pathlib import Path

PR_SET_PTRACER, ANY = 0x59616D61, -1
TAIL = 64


def main() -> None:
    in_memory, in_file, in_memfd = (sys.stdin.readline().strip() for _ in range(3))
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(ANY & 2**64 - 1), 0, 0, 0)
    memory = ctypes.create_string_buffer(b"\0" * 64 + in_memory.encode() + b"\0" * TAIL)
    anonymous = os.memfd_create("secret")
    os.write(anonymous, in_memfd.encode())
    private = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
    os.write(private, in_file.encode())
    Path(sys.argv[1]).unlink()
    sys.stdout.write(f"{ctypes.addressof(memory)} {len(memory)}\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        sys.stdout.write(memory.raw.hex() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
