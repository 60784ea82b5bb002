"""Signals to processes outside: they die, or they stop."""

import ctypes
import fcntl
import os
import signal

from tests.escapes.attacks.attack import Loot, Targets, attack, call, pids

TGKILL, SIGQUEUE, PIDFD_OPEN, PIDFD_SIGNAL = 234, 129, 434, 424
PRIORITY_OTHER, RLIMIT_NOFILE = 0, 7


@attack()
def kill_victim(targets: Targets) -> Loot:
    """Kills a neighbour by its process id."""
    os.kill(targets.victim, signal.SIGKILL)
    return None


@attack()
def stop_victim(targets: Targets) -> Loot:
    """Stops a neighbour."""
    os.kill(targets.victim, signal.SIGSTOP)
    return None


@attack()
def kill_group(targets: Targets) -> Loot:
    """Kills a neighbour's process group."""
    os.killpg(targets.victim, signal.SIGKILL)
    return None


@attack()
def thread_kill(targets: Targets) -> Loot:
    """Kills a neighbour with tgkill."""
    call(TGKILL, targets.victim, targets.victim, signal.SIGKILL)
    return None


@attack()
def pidfd_kill(targets: Targets) -> Loot:
    """Kills a neighbour through a pidfd."""
    call(PIDFD_SIGNAL, call(PIDFD_OPEN, targets.victim, 0), signal.SIGKILL, None, 0)
    return None


@attack()
def queue_signal(targets: Targets) -> Loot:
    """Sends SIGTERM with forged sender data."""
    information = (ctypes.c_int * 32)(signal.SIGTERM, 0, -1)
    call(SIGQUEUE, targets.victim, signal.SIGTERM, information)
    return None


@attack()
def owned_signal(targets: Targets) -> Loot:
    """Makes a neighbour the owner of a pipe whose events send SIGKILL."""
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, targets.victim)
    fcntl.fcntl(reading, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(writing, b"now")
    return None


@attack(is_safe=False)
def kill_everything(targets: Targets) -> Loot:
    """Kills every process that may be signalled, at once."""
    os.kill(-1, signal.SIGKILL)
    return None


@attack(is_safe=False)
def stop_everything(targets: Targets) -> Loot:
    """Stops every process that can be seen."""
    for pid in pids():
        if pid != os.getppid():
            os.kill(pid, signal.SIGSTOP)
    return None


@attack(is_safe=False)
def kill_parents(targets: Targets) -> Loot:
    """Kills its parent, the platform's process, and process 1."""
    for pid in (targets.parent, 1, os.getppid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    return None


@attack(is_safe=False)
def kill_guesses(targets: Targets) -> Loot:
    """Kills process ids that it guesses, because it may not see them."""
    for pid in range(targets.victim - 300, targets.victim + 300):
        if pid > 1 and pid not in (os.getpid(), os.getppid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
    return None


@attack()
def slow_victim(targets: Targets) -> Loot:
    """Gives a neighbour the lowest priority."""
    os.setpriority(os.PRIO_PROCESS, targets.victim, 19)
    return None


@attack()
def starve_victim(targets: Targets) -> Loot:
    """Lowers a neighbour's limit of open files with prlimit."""
    limits = (ctypes.c_ulong * 2)(64, 64)
    call(302, targets.victim, RLIMIT_NOFILE, limits, None)
    return None


@attack()
def pin_victim(targets: Targets) -> Loot:
    """Moves a neighbour to one core."""
    os.sched_setaffinity(targets.victim, {0})
    return None


@attack()
def blame_victim(targets: Targets) -> Loot:
    """Makes a neighbour the first that the kernel kills when memory is short."""
    with open(f"/proc/{targets.victim}/oom_score_adj", "w") as file:
        file.write("1000")
    return None
