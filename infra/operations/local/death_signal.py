"""Child processes that end with their parent, however it ends (Linux: prctl(2))."""

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


def die_with(parent: int, *, by: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn` for a child. The kernel then sends the signal `by` to the child when `parent` (the
    thread that started it) ends. It also unblocks all signals that the parent had blocked."""

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return prepare
