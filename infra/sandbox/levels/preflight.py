"""Says whether bubblewrap can confine user code on this machine, before anything is installed.

`python3 -m infra.sandbox.levels.preflight` exits 1 after one sentence if it cannot. It asks what
`headrace doctor` asks, and imports nothing but the standard library. The demo and the tests need
bubblewrap, because runs that a push starts are refused at level `process-trusted`.
"""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

from infra.sandbox.levels.bubblewrap_errors import TRUSTED, explain
from infra.sandbox.levels.probe import PACKAGE, PROBE_S, find_bubblewrap
from infra.sandbox.user_process import UNPRIVILEGED
from schemas.errors import InvalidConfig

NAMESPACES = (
    *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts"),
    *("--fork", "--mount-proc", "true"),
)
"""A command that makes the namespaces that bubblewrap makes."""


def find_obstacle() -> str | None:
    """The cause that keeps bubblewrap from confining user code here, as one sentence. None if there is
    none, or if the packages that are installed next bring what is missing."""
    try:
        find_bubblewrap()
    except InvalidConfig as error:
        refused = _refusal_of_namespaces() if _is_package_expected() else error
        return refused.message.removesuffix(f", {TRUSTED}") if refused else None
    return None


def _is_package_expected() -> bool:
    """Whether the installation will bring a bubblewrap along that is not here yet."""
    try:
        distribution(PACKAGE)
    except PackageNotFoundError:
        machine = (sys.platform, platform.machine(), platform.libc_ver()[0])
        return machine == ("linux", "x86_64", "glibc")
    return False


def _refusal_of_namespaces() -> InvalidConfig | None:
    """Why the kernel makes no namespaces for the user of user code. None if it makes them."""
    user = UNPRIVILEGED if os.geteuid() == 0 else None
    try:
        ended = subprocess.run(
            NAMESPACES,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            user=user,
            group=user,
            extra_groups=() if user else None,
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # this machine lacks the program, so only bubblewrap itself can tell
    if ended.returncode == 0:
        return None
    said = " ".join(ended.stderr.decode(errors="replace").split())
    return explain(f"Creating new namespace failed: {said}")


def main() -> int:
    """Print the obstacle, if there is one, and return the exit code."""
    obstacle = find_obstacle()
    if obstacle is not None:
        print(f"nothing was installed: {obstacle}", file=sys.stderr)  # noqa: T201 - for `make`
    return 0 if obstacle is None else 1


if __name__ == "__main__":
    sys.exit(main())
