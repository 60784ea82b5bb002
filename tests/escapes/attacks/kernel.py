"""System calls that widen the attack surface of the kernel, or change the whole machine. One that is
refused gives EPERM or ENOSYS. A claim that begins with SYSCALL is one of a filter that lets it pass."""

import ctypes
import errno
import os
import resource
import time
from collections.abc import Sequence

from tests.escapes.attacks.attack import Loot, Targets, attack, call, claim, libc

REFUSED = (errno.EPERM, errno.ENOSYS, errno.EACCES)


def _passes(name: str, number: int, *arguments: object) -> str:
    """A claim if a system call is let through, even if its arguments are wrong."""
    try:
        call(number, *arguments)
    except OSError as error:
        if error.errno in REFUSED:
            return ""
    return claim(f"SYSCALL {name} passes")


@attack()
def keyrings(targets: Targets) -> Loot:
    """Adds a key, and reads those of its user."""
    found = _passes("add_key", 248, b"user", b"escape", b"x", 1, -4)
    return (
        found
        + _passes("keyctl", 250, 0, -4, 1)
        + _passes("request_key", 249, b"user", b"a", None, 0)
    )


@attack()
def berkeley_filter(targets: Targets) -> Loot:
    """Loads a program into the kernel with bpf."""
    return _passes("bpf", 321, 0, (ctypes.c_uint32 * 32)(1, 4, 4, 1), 128)


@attack()
def page_faults(targets: Targets) -> Loot:
    """Handles page faults itself with userfaultfd, which helps to win races in the kernel."""
    return _passes("userfaultfd", 323, 1) + _passes("userfaultfd", 323, 0)


@attack()
def ring_of_requests(targets: Targets) -> Loot:
    """Uses io_uring, which passes by filters of system calls."""
    return _passes("io_uring_setup", 425, 4, (ctypes.c_char * 256)())


@attack()
def performance_events(targets: Targets) -> Loot:
    """Measures the kernel with perf_event_open."""
    attributes = (ctypes.c_uint32 * 32)(1, 112)
    return _passes("perf_event_open", 298, attributes, 0, -1, -1, 0)


@attack()
def other_kernel(targets: Targets) -> Loot:
    """Starts another kernel with kexec."""
    return _passes("kexec_load", 246, 0, 0, None, 0) + _passes(
        "kexec_file_load", 320, -1, -1, 0, None, 8
    )


@attack()
def kernel_modules(targets: Targets) -> Loot:
    """Loads and removes modules of the kernel."""
    return (
        _passes("init_module", 175, b"", 0, b"")
        + _passes("finit_module", 313, -1, b"", 0)
        + _passes("delete_module", 176, b"escape_no_such_module", 0)
    )


@attack()
def restart_machine(targets: Targets) -> Loot:
    """Restarts the machine, with numbers that are not the right ones."""
    return _passes("reboot", 169, 1, 2, 3)


@attack()
def swap_files(targets: Targets) -> Loot:
    """Adds and removes swap files."""
    return _passes("swapon", 167, b"/nonexistent", 0) + _passes("swapoff", 168, b"/nonexistent")


@attack()
def clocks(targets: Targets) -> Loot:
    """Sets the machine's clock to the time that it shows."""
    try:
        time.clock_settime(time.CLOCK_REALTIME, time.time())
    except OSError:
        return None
    return claim("it set the clock")


@attack()
def host_name(targets: Targets) -> Loot:
    """Changes the machine's name."""
    libc.sethostname(b"escape", 6)
    libc.setdomainname(b"escape", 6)
    return None


@attack()
def accounting(targets: Targets) -> Loot:
    """Has the kernel write a record of each process, and asks for quotas."""
    return _passes("acct", 163, None) + _passes("quotactl", 179, 0, b"/dev/none", 0, None)


@attack()
def file_watches(targets: Targets) -> Loot:
    """Watches all files of the machine with fanotify."""
    return _passes("fanotify_init", 300, 0, 0)


@attack()
def ports(targets: Targets) -> Loot:
    """Talks to devices through the processor's ports."""
    return _passes("iopl", 172, 3) + _passes("ioperm", 173, 0x80, 1, 1)


@attack()
def real_time(targets: Targets) -> Loot:
    """Takes a core for itself with a real-time priority."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return None
    return claim("it has a real-time priority")


@attack()
def raise_limits(targets: Targets) -> Loot:
    """Raises its own limits."""
    found = ""
    kinds = ("NPROC", "NOFILE", "FSIZE", "CORE", "AS", "MEMLOCK", "MSGQUEUE")
    for kind in kinds:
        number = getattr(resource, f"RLIMIT_{kind}", None)
        if number is None:
            continue
        _, hard = resource.getrlimit(number)
        if hard == resource.RLIM_INFINITY:
            if kind in ("NPROC", "NOFILE", "FSIZE", "CORE", "AS"):
                found += claim(f"{kind} has no limit")
            continue
        try:
            resource.setrlimit(number, (hard + 1, hard + 1))
            found += claim(f"it raised {kind}")
        except (OSError, ValueError):
            continue
    return found


@attack()
def other_numbers(targets: Targets) -> Loot:
    """Makes the same calls by the numbers of another calling convention (x32)."""
    found = ""
    for name, number in (("keyctl", 250), ("bpf", 321), ("io_uring_setup", 425)):
        found += _passes(f"x32 {name}", 0x40000000 | number, 0, None, 0)
    return found


def _machine_code(number: int) -> Sequence[int]:
    # mov eax, number; xor ebx, ebx; xor ecx, ecx; int 0x80; ret
    return (
        0x53,
        0xB8,
        *number.to_bytes(4, "little"),
        0x31,
        0xDB,
        0x31,
        0xC9,
        0xCD,
        0x80,
        0x5B,
        0xC3,
    )


@attack()
def old_system_calls(targets: Targets) -> Loot:
    """Makes calls through the gate of 32-bit programs, whose numbers differ."""
    import mmap

    found = ""
    for name, number in (("keyctl", 288), ("bpf", 357), ("ptrace", 26), ("unshare", 310)):
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(bytes(_machine_code(number)))
        run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        if -run() not in (*REFUSED, errno.EFAULT):
            found += claim(f"SYSCALL 32-bit {name} passes")
    return found


@attack()
def move_pages_of_victim(targets: Targets) -> Loot:
    """Moves the memory of a neighbour to other nodes."""
    return _passes("move_pages", 279, targets.victim, 0, None, None, None, 0)
