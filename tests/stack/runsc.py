"""gVisor's program runsc, built once from its Go module at the version pinned here, and kept in a cache
(`make gvisor`). A build takes about a minute of both cores."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from infra.sandbox.levels.gvisor_program import VERSION, built_runsc
from schemas.errors import InvalidConfig

MODULE = f"gvisor.dev/gvisor/runsc@{VERSION}"
TOOLCHAIN = "go1.23.6"
"""gVisor relies on the layout of the runtime of its own Go. With a newer one it builds, and then panics
in every third start."""

BUILD_S = 1800.0


def program() -> Path:
    """The program, built now if it is not in the cache. Raises InvalidConfig when it cannot be built."""
    found = built_runsc()
    if found.exists():
        return found
    go = shutil.which("go")
    if go is None:
        raise InvalidConfig(
            f"runsc is built with Go, which is not on PATH: install Go, or put runsc at {found}"
        )
    found.parent.mkdir(parents=True, exist_ok=True)
    with found.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            _build(go, found)
    return found


def _build(go: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        # A program that loads libraries cannot run where there are none.
        toolchain = {"CGO_ENABLED": "0", "GOTOOLCHAIN": TOOLCHAIN}
        environment = {**os.environ, **toolchain, "GOBIN": scratch}
        done = subprocess.run(
            ["nice", "-n", "10", go, "install", "-ldflags", "-s -w", MODULE],
            env=environment,
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
        if done.returncode:
            raise InvalidConfig(f"runsc {VERSION} cannot be built; Go says: {done.stderr[-800:]}")
        (Path(scratch) / "runsc").rename(target)


def main() -> int:
    """Build the program into the cache, for `make gvisor`."""
    try:
        sys.stdout.write(f"runsc {VERSION} is at {program()}\n")
    except InvalidConfig as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
