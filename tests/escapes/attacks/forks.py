"""Exhaustion of what processes share: process ids, threads, descriptors. Each attack has a bound of its
own, so that it does not harm a machine without limits."""

import os
import socket
import sys
import threading
import time

from tests.escapes.attacks.attack import Loot, Targets, attack, call

MOST_PROCESSES = 1200
HOLD_S = 0.7


def _sleep_in_children(number: int) -> int:
    made = 0
    for _ in range(number):
        try:
            if os.fork() == 0:
                time.sleep(HOLD_S + 1.0)
                os._exit(0)
        except OSError:
            break
        made += 1
    time.sleep(HOLD_S)
    return made


@attack(is_safe=False)
def fork_bomb(targets: Targets) -> Loot:
    """Forks until it may not, and holds the processes. A neighbour forks meanwhile."""
    _sleep_in_children(MOST_PROCESSES)
    return None


@attack()
def few_forks(targets: Targets) -> Loot:
    """Leaves 40 children that nobody waits for."""
    for _ in range(40):
        if os.fork() == 0:
            os._exit(0)
    return None


@attack(is_safe=False)
def thread_bomb(targets: Targets) -> Loot:
    """Starts threads until it may not. A neighbour starts one meanwhile."""
    threading.stack_size(32 << 10)
    gate = threading.Event()
    try:
        for _ in range(MOST_PROCESSES):
            threading.Thread(target=gate.wait, args=(HOLD_S,), daemon=True).start()
    except RuntimeError:
        pass
    time.sleep(HOLD_S)
    return None


@attack()
def exec_bomb(targets: Targets) -> Loot:
    """Replaces its program thirty times in a row."""
    program = """import os, sys
left, program = int(sys.argv[1]), sys.argv[2]
if left:
    again = [sys.executable, "-I", "-S", "-c", program, str(left - 1), program]
    os.execv(sys.executable, again)
"""
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", program, "30", program])


@attack()
def descriptor_bomb(targets: Targets) -> Loot:
    """Opens files until it may not, as pipes, sockets and event counters."""
    kept: list[object] = []
    try:
        while len(kept) < 20_000:
            kept.append(os.pipe())
            kept.append(socket.socketpair())
            kept.append(os.eventfd(0))
    except OSError:
        pass
    time.sleep(0.2)
    return None


@attack()
def watch_bomb(targets: Targets) -> Loot:
    """Uses up the inotify instances of its user, which processes of one user share."""
    try:
        for _ in range(200):
            call(294, 0)
    except OSError:
        pass
    time.sleep(0.2)
    return None


@attack()
def lock_bomb(targets: Targets) -> Loot:
    """Locks 256 MiB of memory, so that it cannot be swapped out."""
    import mmap

    held = mmap.mmap(-1, 256 << 20)
    call(149, ctypes_address(held), 256 << 20)
    return None


def ctypes_address(held: object) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(held))  # type: ignore[arg-type]  # a writable buffer


@attack()
def memory_bomb(targets: Targets) -> Loot:
    """Takes 256 MiB and touches every page."""
    held = bytearray(256 << 20)
    return None if held[-1] == 0 else "changed"
