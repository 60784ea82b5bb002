"""The first program of a confined process: it sets the limits, then becomes the host of user code.

Started as `python -I -S launch.py ROLE FD_IN FD_OUT ENTRYPOINT`. Its first byte in FD_OUT says that the
limits hold and that no user code has run yet. The rollout's own variables have a
prefix in their names, so nothing of the user has an effect before the limits hold, not even a variable
that the dynamic linker reads. User code cannot undo what is set here.
"""

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

PREFIX = "HEADRACE_ENV_"
PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
LIMITS = "HEADRACE_LIMITS"
"""The variable with bytes of memory and of a file, and the numbers of processes and of open files."""
KILLED_FIRST = "1000"
LAUNCHED = b"\0"


def confine() -> None:
    """Set the limits of this process, forbid it to gain rights, have it killed when its parent dies, and
    before others when memory runs out."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(
            ctypes.get_errno(),
            "this kernel refuses PR_SET_NO_NEW_PRIVS; run Headrace on Linux 3.5 or later",
        )
    memory, file, processes, files = map(int, os.environ.pop(LIMITS).split())
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: file,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_NOFILE: files,
    }
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (allowed, allowed))
    Path("/proc/self/oom_score_adj").write_text(KILLED_FIRST)


def main() -> None:
    confine()
    os.write(int(sys.argv[3]), LAUNCHED)
    own = {
        name.removeprefix(PREFIX): value
        for name, value in os.environ.items()
        if name.startswith(PREFIX)
    }
    fixed = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    host = Path(__file__).with_name("user_code_host.py")
    os.execve(  # noqa: S606 - ourselves
        sys.executable, [sys.executable, "-I", str(host), *sys.argv[1:]], {**fixed, **own}
    )


if __name__ == "__main__":
    main()
