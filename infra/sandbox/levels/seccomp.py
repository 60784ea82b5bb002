"""The filter of system calls of confined processes, as a program for the kernel (classic BPF).

It refuses what Docker's default filter refuses without capabilities, and also what reads or changes
other processes (ptrace, process_vm_*), io_uring, keyrings, new namespaces, and kinds of sockets that a
rollout has no use for. A call that is newer than this list does not exist, so the C library uses an
older one. Numbers are those of the kernel's `unistd.h`, on x86_64 and aarch64.
"""

import errno
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence

from schemas.errors import InvalidConfig

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of `linux/audit.h`, by the machine's name."""

NEWEST = 456
"""The last call that is known here (futex_requeue). From 424 on, all architectures number alike."""

X32_BIT = 0x40000000
NEW_NAMESPACES = 0x7E020000
"""All CLONE_NEW* flags that `clone` takes."""

PERSONALITIES = (0, 0xFFFFFFFF, 0x0040000)
"""The personalities that may be set: Linux, none (it asks for the current one), and Linux without
random addresses."""

FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""

PROTOCOLS = (0, 1, 6, 17, 58)
"""The default, ICMP, TCP, UDP and ICMPv6. Others would make the kernel load modules."""

TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which write what seems to be typed."""

_TABLE = """
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440,
process_mrelease 448 448, pidfd_getfd 438 438, kcmp 312 272, perf_event_open 298 241, bpf 321 280,
userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427,
keyctl 250 219, add_key 248 217, request_key 249 218, unshare 272 97, setns 308 268, mount 165 40,
umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428, move_mount 429 429,
fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442,
kexec_load 246 104, kexec_file_load 320 294, create_module 174 -, init_module 175 105,
finit_module 313 273, delete_module 176 106, get_kernel_syms 177 -, query_module 178 -, acct 163 89,
swapon 167 224, swapoff 168 225, reboot 169 142, settimeofday 164 170, clock_settime 227 112,
clock_adjtime 305 266, sethostname 170 161, setdomainname 171 162, syslog 103 116, quotactl 179 60,
quotactl_fd 443 443, nfsservctl 180 42, name_to_handle_at 303 264, open_by_handle_at 304 265,
lookup_dcookie 212 18, fanotify_init 300 262, fanotify_mark 301 263, vhangup 153 58, ioperm 173 -,
iopl 172 -, modify_ldt 154 -, uselib 134 -, ustat 136 -, sysfs 139 -, _sysctl 156 -, mbind 237 235,
set_mempolicy 238 237, get_mempolicy 239 236, migrate_pages 256 238, move_pages 279 239,
set_mempolicy_home_node 450 450, memfd_secret 447 447, vserver 236 -
"""
_CHECKED = """
clone 56 220, clone3 435 435, personality 135 92, socket 41 198, socketpair 53 199, ioctl 16 29
"""
_UNCOUNTED = "memfd_create 319 279, shmget 29 194"

LOAD, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
AND = 0x54
"""Instructions of classic BPF, by the names of what they do."""

ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`. Arguments have eight bytes, of which the lower ones are checked."""

Instruction = tuple[int, int, int, int]


def _parse(table: str, machine: str) -> Mapping[str, int]:
    column = tuple(ARCHITECTURES).index(machine) + 1
    rows = [entry.split() for entry in table.replace("\n", " ").split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def denied_calls(machine: str, *, uncounted_memory: bool) -> Mapping[str, int]:
    """The calls that always fail, with their numbers. Without `uncounted_memory` those are among them
    that make memory which belongs to no process."""
    calls = _parse(_TABLE, machine)
    return calls if uncounted_memory else {**calls, **_parse(_UNCOUNTED, machine)}


def checked_calls(machine: str) -> Mapping[str, int]:
    """The calls whose arguments decide, with their numbers."""
    return _parse(_CHECKED, machine)


def compile_filter(machine: str | None = None, *, uncounted_memory: bool) -> bytes:
    """Return the filter as the kernel and bubblewrap read it. Raises InvalidConfig on a machine of
    another kind."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise InvalidConfig(
            f"there is no filter of system calls for {machine!r}; run user code on x86_64 or aarch64"
        )
    program = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        _return(KILL),
        (LOAD, 0, 0, NUMBER),
        (ABOVE, 0, 1, X32_BIT - 1),
        _return(KILL if machine == "x86_64" else _fail(errno.ENOSYS)),
        (ABOVE, 0, 1, NEWEST),
        _return(_fail(errno.ENOSYS)),
    ]
    for number in denied_calls(machine, uncounted_memory=uncounted_memory).values():
        program += [(EQUAL, 0, 1, number), _return(_fail(errno.EPERM))]
    numbers = checked_calls(machine)
    for name, check in _argument_checks().items():
        program += [(EQUAL, 0, len(check), numbers[name]), *check]
    program.append(_return(ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _argument_checks() -> Mapping[str, Sequence[Instruction]]:
    """The checks of calls that depend on their arguments. Each of them ends with a decision."""
    return {
        "clone": [
            _argument(0),
            (ANY_BIT, 0, 1, NEW_NAMESPACES),
            _return(_fail(errno.EPERM)),
            _return(ALLOW),
        ],
        "clone3": [
            _return(_fail(errno.ENOSYS))
        ],  # its flags are in memory, which no filter can read
        "personality": list(_only(0, PERSONALITIES, _fail(errno.EPERM))),
        "ioctl": [
            _argument(1),
            *((EQUAL, 2 - place, 0, n) for place, n in enumerate(TERMINAL_INPUT)),
            _return(ALLOW),
            _return(_fail(errno.EPERM)),
        ],
        "socketpair": list(_only(0, FAMILIES[:1], _fail(errno.EAFNOSUPPORT))),
        "socket": list(_socket()),
    }


def _socket() -> Iterator[Instruction]:
    """A Unix socket of any type, or a stream or datagram socket of the internet's protocols."""
    unix, *internet = FAMILIES
    yield from (
        _argument(0),
        (EQUAL, 0, 1, unix),
        _return(ALLOW),
        *((EQUAL, len(internet) - place, 0, f) for place, f in enumerate(internet)),
        _return(_fail(errno.EAFNOSUPPORT)),
        _argument(1),
        (AND, 0, 0, 0xF),
        (EQUAL, 2, 0, 1),
        (EQUAL, 1, 0, 2),
        _return(_fail(errno.EPERM)),
    )
    yield from _only(2, PROTOCOLS, _fail(errno.EPROTONOSUPPORT))


def _only(argument: int, values: Sequence[int], otherwise: int) -> Iterator[Instruction]:
    yield _argument(argument)
    for place, value in enumerate(values):
        yield (EQUAL, len(values) - place, 0, value)
    yield _return(otherwise)
    yield _return(ALLOW)


def _argument(number: int) -> Instruction:
    return (LOAD, 0, 0, ARGUMENTS + 8 * number)


def _return(action: int) -> Instruction:
    return (RETURN, 0, 0, action)


def _fail(error: int) -> int:
    return FAIL | error
