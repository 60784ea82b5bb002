"""The filter of system calls: its numbers are the kernel's, and it decides as documented."""

import ctypes
import ctypes.util
import errno
import struct

import pytest

from infra.sandbox.levels import seccomp
from schemas.errors import InvalidConfig

X86, ARM = "x86_64", "aarch64"


def decide(program: bytes, number: int, *arguments: int, architecture: int = 0xC000003E) -> int:
    """What the kernel returns for a call: a small machine for classic BPF."""
    words = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("=iIQ6Q", number - (1 << 32) * (number >> 31), architecture, 0, *words)
    instructions = list(struct.iter_unpack("=HBBI", program))
    place, value = 0, 0
    while True:
        code, yes, no, operand = instructions[place]
        place += 1
        if code == seccomp.RETURN:
            return int(operand)
        if code == seccomp.LOAD:
            value = struct.unpack_from("=I", data, operand)[0]
        elif code == seccomp.AND:
            value &= operand
        else:
            true = {
                seccomp.EQUAL: value == operand,
                seccomp.ABOVE: value > operand,
                seccomp.ANY_BIT: bool(value & operand),
            }[code]
            place += yes if true else no


FILTER = seccomp.compile_filter(X86, uncounted_memory=True)


def failing(error: int) -> int:
    return seccomp.FAIL | error


@pytest.mark.parametrize("machine", [X86, ARM])
def test_numbers_are_those_of_libseccomp(machine: str) -> None:
    name = ctypes.util.find_library("seccomp")
    if name is None:
        pytest.skip("libseccomp is not installed")
    library = ctypes.CDLL(name)
    kind = seccomp.ARCHITECTURES[machine]
    calls = seccomp.denied_calls(machine, uncounted_memory=False)
    assert len(calls) >= 60
    for call, number in {**calls, **seccomp.checked_calls(machine)}.items():
        known = library.seccomp_syscall_resolve_name_arch(ctypes.c_uint32(kind), call.encode())
        assert known == number, call


@pytest.mark.parametrize("machine", [X86, ARM])
def test_each_denied_call_fails_and_ordinary_ones_do_not(machine: str) -> None:
    program = seccomp.compile_filter(machine, uncounted_memory=False)
    kind = seccomp.ARCHITECTURES[machine]
    for number in seccomp.denied_calls(machine, uncounted_memory=False).values():
        assert decide(program, number, architecture=kind) == failing(errno.EPERM)
    ordinary = {X86: (0, 1, 59, 57, 202, 334, 436), ARM: (63, 64, 221, 98, 436)}[machine]
    for number in ordinary:
        assert decide(program, number, architecture=kind) == seccomp.ALLOW


def test_other_kinds_of_calls_end_the_process_or_do_not_exist() -> None:
    assert decide(FILTER, 1, architecture=0x40000003) == seccomp.KILL, "i386"
    assert decide(FILTER, 0x40000000 | 1) == seccomp.KILL, "x32"
    assert decide(FILTER, 457) == failing(errno.ENOSYS)
    assert decide(FILTER, 435) == failing(errno.ENOSYS), "clone3"


SOCKET, SOCKETPAIR, CLONE, IOCTL, PERSONALITY = 41, 53, 56, 16, 135


@pytest.mark.parametrize(
    ("call", "arguments", "decision"),
    [
        (CLONE, (0x11,), seccomp.ALLOW),
        *(
            (CLONE, (flag | 0x11,), failing(errno.EPERM))
            for flag in (1 << 17, *(1 << n for n in range(25, 31)))
        ),
        (SOCKET, (1, 5, 0), seccomp.ALLOW),
        (SOCKET, (2, 1 | 0o2004000, 6), seccomp.ALLOW),
        (SOCKET, (10, 2, 17), seccomp.ALLOW),
        (SOCKET, (2, 3, 255), failing(errno.EPERM)),
        (SOCKET, (2, 5, 132), failing(errno.EPERM)),
        (SOCKET, (2, 1, 132), failing(errno.EPROTONOSUPPORT)),
        (SOCKET, (2, 1, 262), failing(errno.EPROTONOSUPPORT)),
        *((SOCKET, (n, 2, 0), failing(errno.EAFNOSUPPORT)) for n in (16, 17, 29, 38, 40, 44)),
        (SOCKETPAIR, (1, 1, 0), seccomp.ALLOW),
        (SOCKETPAIR, (30, 1, 0), failing(errno.EAFNOSUPPORT)),
        (IOCTL, (0, 0x5401), seccomp.ALLOW),
        (IOCTL, (0, 0x5412), failing(errno.EPERM)),
        (IOCTL, (0, 0x1_0000_541C), failing(errno.EPERM)),
        (PERSONALITY, (0xFFFFFFFF,), seccomp.ALLOW),
        (PERSONALITY, (0x0400000,), failing(errno.EPERM)),
    ],
)
def test_arguments_decide(call: int, arguments: tuple[int, ...], decision: int) -> None:
    assert decide(FILTER, call, *arguments) == decision


def test_memory_that_belongs_to_no_process_needs_a_control_group() -> None:
    strict = seccomp.compile_filter(X86, uncounted_memory=False)
    for call in (319, 29):
        assert decide(FILTER, call) == seccomp.ALLOW
        assert decide(strict, call) == failing(errno.EPERM)


def test_there_is_no_filter_for_other_machines() -> None:
    with pytest.raises(InvalidConfig, match="riscv64"):
        seccomp.compile_filter("riscv64", uncounted_memory=True)
