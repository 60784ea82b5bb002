"""Shared memory and other objects of System V and POSIX, which processes share by name."""

import ctypes
import os

from tests.escapes.attacks.attack import Loot, Targets, attack, call, libc, read, write

libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
CREATE = 0o1000


@attack()
def read_segment(targets: Targets) -> Loot:
    """Reads a System V segment of another process."""
    place = libc.shmat(libc.shmget(targets.shm_key, 0, 0), None, 0)
    return None if place in (None, ctypes.c_void_p(-1).value) else ctypes.string_at(place, 256)


@attack()
def write_segment(targets: Targets) -> Loot:
    """Overwrites a System V segment of another process."""
    place = libc.shmat(libc.shmget(targets.shm_key, 0, 0), None, 0)
    if place not in (None, ctypes.c_void_p(-1).value):
        ctypes.memmove(place + 128, b"changed", 7)
    return None


@attack()
def segments_of_all(targets: Targets) -> Loot:
    """Attaches every System V segment that the kernel lists."""
    found = b""
    for line in read("/proc/sysvipc/shm").decode().splitlines()[1:]:
        place = libc.shmat(int(line.split()[1]), None, 0o10000)
        if place not in (None, ctypes.c_void_p(-1).value):
            found += ctypes.string_at(place, 256)
    return targets.marks(found)


@attack()
def remove_segment(targets: Targets) -> Loot:
    """Removes a System V segment of another process."""
    libc.shmctl(libc.shmget(targets.shm_key, 0, 0), 0, None)
    return None


@attack()
def new_segment(targets: Targets) -> Loot:
    """Leaves a System V segment, a queue and semaphores behind."""
    libc.shmget(targets.shm_key + 1, 4096, CREATE | 0o666)
    libc.msgget(targets.shm_key + 1, CREATE | 0o666)
    libc.semget(targets.shm_key + 1, 4, CREATE | 0o666)
    return None


@attack()
def read_posix(targets: Targets) -> Loot:
    """Reads the POSIX shared memory of another process."""
    return read(f"/dev/shm/{targets.shm_name}")


@attack()
def write_posix(targets: Targets) -> Loot:
    """Overwrites the POSIX shared memory of another process."""
    write(f"/dev/shm/{targets.shm_name}", "changed", flags=0)
    return None


@attack()
def new_posix(targets: Targets) -> Loot:
    """Leaves POSIX shared memory and a queue behind."""
    write(f"/dev/shm/{targets.name('new_posix')}", "left")
    call(240, targets.name("new_posix").encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
    return None


@attack()
def anonymous_file(targets: Targets) -> Loot:
    """Reads the anonymous file (memfd) of a neighbour through /proc."""
    return b"".join(read(f"/proc/{targets.victim}/fd/{number}") for number in range(3, 10))
