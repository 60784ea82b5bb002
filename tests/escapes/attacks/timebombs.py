"""Actions that wait until nobody looks: after the answer, at the end of the process, or later."""

import asyncio
import atexit
import os
import signal
import socket
import threading
import time

from tests.escapes.attacks.attack import Loot, Targets, attack, remain

DELAY_S = 0.3


def _act(targets: Targets, name: str) -> None:
    """Connects to the platform's port, and leaves a process."""
    try:
        with socket.create_connection(("127.0.0.1", targets.tcp), 0.3) as talking:
            talking.sendall(targets.name(name).encode())
    except OSError:
        pass
    if os.fork() == 0:
        os.setsid()
        remain(targets.name(name))


@attack(in_child=False)
def at_exit(targets: Targets) -> Loot:
    """Acts when its process ends."""
    atexit.register(_act, targets, "at_exit")
    return None


@attack(in_child=False)
def later_thread(targets: Targets) -> Loot:
    """Acts in a thread after it has answered."""
    threading.Timer(DELAY_S, _act, (targets, "later_thread")).start()
    return None


@attack(in_child=False)
def later_task(targets: Targets) -> Loot:
    """Acts in the event loop after it has answered."""
    asyncio.get_running_loop().call_later(DELAY_S, _act, targets, "later_task")
    return None


@attack(in_child=False)
def alarm(targets: Targets) -> Loot:
    """Acts in the handler of a timer's signal."""
    signal.signal(signal.SIGALRM, lambda *_: _act(targets, "alarm"))
    signal.setitimer(signal.ITIMER_REAL, DELAY_S)
    return None


@attack()
def delayed_daemon(targets: Targets) -> Loot:
    """Leaves a process that acts later."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(DELAY_S)
        _act(targets, "delayed_daemon")
        os._exit(0)
    return None


@attack()
def orphan_acts(targets: Targets) -> Loot:
    """Leaves a process that acts when its sandbox has ended."""
    parent = os.getppid()
    if os.fork() == 0:
        os.setsid()
        os.closerange(3, 4096)
        until = time.monotonic() + 15
        while time.monotonic() < until:
            try:
                os.kill(parent, 0)
            except OSError:
                break
            time.sleep(0.05)
        _act(targets, "orphan_acts")
        os._exit(0)
    return None


@attack(in_child=False)
def at_its_end(targets: Targets) -> Loot:
    """Acts when it is told to end."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: _act(targets, "at_its_end"))
    return None
