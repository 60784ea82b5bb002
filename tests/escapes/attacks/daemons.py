"""Processes that are to outlive their sandbox. The harness searches for their names after it has closed
the sandbox."""

import ctypes
import os
import signal
import subprocess
import sys
import time

from tests.escapes.attacks.attack import SLEEP, Loot, Targets, attack, call, libc, remain, write

SUBREAPER, PDEATHSIG, SET_NAME = 36, 1, 15
CLONE_PARENT, CLONE_UNTRACED = 0x8000, 0x800000


@attack()
def double_fork(targets: Targets) -> Loot:
    """Leaves a grandchild whose parent has ended."""
    if os.fork() == 0:
        if os.fork() == 0:
            remain(targets.name("double_fork"))
        os._exit(0)
    return None


@attack()
def new_session(targets: Targets) -> Loot:
    """Leaves a process in a session and a process group of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            remain(targets.name("new_session"))
        os._exit(0)
    return None


@attack()
def subreaper(targets: Targets) -> Loot:
    """Leaves a process that adopts orphans, and an orphan."""
    if os.fork() == 0:
        os.setsid()
        libc.prctl(SUBREAPER, 1, 0, 0, 0)
        if os.fork() == 0:
            remain(targets.name("subreaper"))
        remain(targets.name("subreaper"))
    return None


@attack()
def without_death_signal(targets: Targets) -> Loot:
    """Clears the signal at the parent's death and leaves a process."""
    libc.prctl(PDEATHSIG, 0, 0, 0, 0)
    if os.fork() == 0:
        os.setsid()
        libc.prctl(PDEATHSIG, 0, 0, 0, 0)
        remain(targets.name("without_death_signal"))
    return None


@attack()
def sibling(targets: Targets) -> Loot:
    """Creates a process whose parent is the platform's, with CLONE_PARENT."""
    if call(56, CLONE_PARENT | CLONE_UNTRACED | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        os.setsid()
        remain(targets.name("sibling"))
    return None


@attack()
def relay_of_forks(targets: Targets) -> Loot:
    """Forks every 20 ms and ends its former self, so that no signal finds it. It stops after 10 s."""
    if os.fork() == 0:
        os.setsid()
        program = """import os, time
until = time.monotonic() + 10
while time.monotonic() < until:
    time.sleep(0.02)
    if os.fork():
        os._exit(0)
    os.setsid()
"""
        os.closerange(3, 4096)
        os.execv(
            sys.executable,
            [sys.executable, "-I", "-S", "-c", program, targets.name("relay_of_forks")],
        )
    return None


@attack()
def program_setsid(targets: Targets) -> Loot:
    """Leaves a process by way of the program setsid."""
    subprocess.Popen(
        ["setsid", "-f", sys.executable, "-I", "-S", "-c", SLEEP, targets.name("program_setsid")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return None


@attack()
def stopped_child(targets: Targets) -> Loot:
    """Leaves a process that is stopped and traced by another one."""
    child = os.fork()
    if child == 0:
        os.setsid()
        remain(targets.name("stopped_child"))
    time.sleep(0.2)
    tracer = os.fork()
    if tracer == 0:
        os.setsid()
        libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        libc.ptrace(0x4206, child, None, None)
        os.kill(child, signal.SIGSTOP)
        remain(targets.name("stopped_child"))
    return None


@attack()
def scheduled_job(targets: Targets) -> Loot:
    """Writes a job for cron, at, systemd and the shell of the user."""
    line = f"* * * * * root true {targets.name('scheduled_job')}\n"
    for place in (
        f"/etc/cron.d/{targets.name('scheduled_job')}",
        f"/var/spool/cron/crontabs/{targets.name('scheduled_job')}",
        f"/etc/profile.d/{targets.name('scheduled_job')}.sh",
        f"/etc/systemd/system/{targets.name('scheduled_job')}.service",
    ):
        write(place, line)
    return None
