"""Programs that are built from Go once, and kept in the cache of this user."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from schemas.errors import InvalidConfig


def cache() -> Path:
    """Where programs that were built stay: `$XDG_CACHE_HOME/headrace`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def build_once(target: Path, build: Callable[[str, Path], None], *, otherwise: str) -> Path:
    """Return `target`, which `build` makes now if it is not there, with Go and the target as arguments.
    A build takes all cores, so a second process waits for it. Raises InvalidConfig without Go, which
    ends with what to do `otherwise`."""
    if target.exists():
        return target
    go = shutil.which("go")
    if go is None:
        raise InvalidConfig(
            f"{target.name} is built with Go, which is not on PATH: install Go, or {otherwise}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            build(go, target)
    return target
