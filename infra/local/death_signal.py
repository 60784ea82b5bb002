"""Children that do not outlive their parent, however it ends (Linux: prctl(2))."""

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


def die_with(parent: int, *, by: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """What runs in a child before its program: the kernel sends it `by` when `parent` (the thread that
    started it) ends; and it takes all signals again, whatever its parent had blocked."""

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return prepare
