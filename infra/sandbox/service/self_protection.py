"""Protection of a process from others of the same user, and from outliving its parent.

User code may have the same user as the platform, where the platform cannot change to another one.
"""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4


def hide_memory() -> None:
    """Close /proc/PID/environ and /proc/PID/mem of this process to its own user, forbid others to trace
    it, and write no core dumps. An exec undoes this."""
    _prctl(PR_SET_DUMPABLE, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends. Exit if it has ended already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"this kernel refuses prctl option {option}")
