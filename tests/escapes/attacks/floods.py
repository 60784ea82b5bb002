"""More output than anybody can hold: prints, messages, errors, names. The harness measures its own
memory, and the length of what comes back."""

import os
import struct
import sys

from tests.escapes.attacks.attack import Loot, Targets, attack

MIB = 1 << 20


def _send(message: bytes) -> None:
    """Writes a whole message into the pipe of messages."""
    view = memoryview(struct.pack(">I", len(message)) + message)
    while view:
        view = view[os.write(int(sys.argv[3]), view) :]


@attack(in_child=False)
def print_much(targets: Targets) -> Loot:
    """Prints 128 MiB to its output, and as much to its errors."""
    block = b"x" * MIB
    for _ in range(128):
        os.write(1, block)
        os.write(2, block)
    return None


@attack(in_child=False)
def print_controls(targets: Targets) -> Loot:
    """Prints codes that terminals obey, and bytes that are no text."""
    os.write(1, b"\x1b]0;escape\x07\x1b[2J\x00\xff\xfe\r\n" * 1000)
    return None


@attack(in_child=False)
def many_messages(targets: Targets) -> Loot:
    """Sends a hundred thousand small messages that belong to no call."""
    message = b'{"stuck": null}'
    block = (struct.pack(">I", len(message)) + message) * 1000
    for _ in range(100):
        os.write(int(sys.argv[3]), block)
    return None


@attack(in_child=False)
def deep_message(targets: Targets) -> Loot:
    """Sends JSON that is nested a million times."""
    _send(b"[" * MIB + b"]" * MIB)
    return None


@attack(in_child=False)
def huge_number(targets: Targets) -> Loot:
    """Sends a number of a million digits."""
    _send(b'{"id": ' + b"9" * MIB + b"}")
    return None


@attack(in_child=False)
def long_message(targets: Targets) -> Loot:
    """Sends a message of 15 MiB."""
    _send(b'{"id": "' + b"x" * (15 * MIB) + b'"}')
    return None


@attack(in_child=False)
def long_error(targets: Targets) -> Loot:
    """Raises an error with a text of 32 MiB."""
    raise RuntimeError("x" * (32 * MIB))


@attack(in_child=False)
def chain_of_errors(targets: Targets) -> Loot:
    """Raises an error with five thousand causes."""
    error = RuntimeError("the first")
    for number in range(5000):
        following = RuntimeError(f"number {number}")
        following.__cause__ = error
        error = following
    raise error


class _Bad(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    def __repr__(self) -> str:
        return "x" * (32 * MIB)


@attack(in_child=False)
def bad_error(targets: Targets) -> Loot:
    """Raises an error whose text cannot be had."""
    raise _Bad


@attack(in_child=False)
def long_name_of_error(targets: Targets) -> Loot:
    """Raises an error whose class has a name of 8 MiB."""
    raise type("X" * (8 * MIB), (Exception,), {})


@attack(in_child=False)
def long_answer(targets: Targets) -> Loot:
    """Answers with text of 64 MiB."""
    return "x" * (64 * MIB)


@attack(in_child=False)
def endless_recursion(targets: Targets) -> Loot:
    """Calls itself until it may not."""

    def again(depth: int) -> int:
        return again(depth + 1) + 1

    return str(again(0))


@attack(in_child=False)
def exit_loudly(targets: Targets) -> Loot:
    """Ends its process during a call, and prints much."""
    os.write(1, b"x" * MIB)
    os._exit(3)


@attack(in_child=False)
def system_exit(targets: Targets) -> Loot:
    """Raises SystemExit, which ends programs."""
    sys.exit("x" * MIB)
