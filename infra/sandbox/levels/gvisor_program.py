"""Finds gVisor's program runsc, and tests that it works here."""

import os
import pwd
import shutil
import subprocess
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from infra.sandbox.levels.bubblewrap_options import encode, memory_file
from infra.sandbox.levels.gvisor_options import plan_gvisor
from infra.sandbox.levels.level import ConfinedCommand
from infra.sandbox.levels.reachable_program import reachable_copy
from infra.sandbox.user_process import UNPRIVILEGED
from schemas.errors import InvalidConfig

VERSION = "v0.0.0-20250205023644-9414b50a5633"
"""The version that is tested."""

BUILD = 3
"""Counts the ways in which `make gvisor` has built this version."""

PLACES = "/usr/local/bin:/usr/bin:/bin"
PROBE_S = 30.0


def built_runsc() -> Path:
    """Where `make gvisor` puts the program, for this user."""
    own = os.environ.get("XDG_CACHE_HOME")
    if own is None:
        try:
            own = f"{pwd.getpwuid(os.geteuid()).pw_dir}/.cache"
        except KeyError:  # a container's user may have no entry
            own = "/nonexistent"
    return Path(own) / "headrace" / f"runsc-{VERSION}-{BUILD}"


@cache
def find_runsc(bubblewrap: Path) -> Path:
    """Return the path of runsc after one start in which it confined a program. Raises InvalidConfig when
    that is impossible here."""
    found = _from_variable() or _from_cache() or _from_system()
    if found is None:
        raise InvalidConfig(
            "sandbox level 'gvisor' needs the program runsc, which is not on this machine: install it "
            "(https://gvisor.dev/docs/user_guide/install/), build it with `make gvisor`, or name it in "
            "HEADRACE_RUNSC"
        )
    found = found.resolve()
    placed = reachable_copy(found.parent, [found.name], name="runsc") / found.name
    _try(bubblewrap, placed)
    return placed


def _from_variable() -> Path | None:
    named = os.environ.get("HEADRACE_RUNSC")
    if named and not Path(named).is_file():
        raise InvalidConfig(
            f"HEADRACE_RUNSC is {named!r}, which is not a file; name the program runsc"
        )
    return Path(named) if named else None


def _from_cache() -> Path | None:
    return built_runsc() if built_runsc().is_file() else None


def _from_system() -> Path | None:
    found = shutil.which("runsc", path=PLACES)
    return Path(found) if found else None


def _try(bubblewrap: Path, runsc: Path) -> None:
    """Raise InvalidConfig unless a program runs confined."""
    confined = os.geteuid() == 0
    with ExitStack() as held:
        plan = plan_gvisor(runsc, ConfinedCommand(["/bin/true"], {}, Path("/")), held)
        descriptor = memory_file(encode(plan.options.arguments))
        held.callback(os.close, descriptor)
        try:
            ended = subprocess.run(
                [str(bubblewrap), "--args", str(descriptor), "--", *plan.argv],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={},
                cwd="/",
                pass_fds=(descriptor, *plan.options.descriptors),
                user=UNPRIVILEGED if confined else None,
                group=UNPRIVILEGED if confined else None,
                extra_groups=() if confined else None,
                timeout=PROBE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise InvalidConfig(
                f"sandbox level 'gvisor' does not work here: {runsc} did not start a program within "
                f"{PROBE_S:g} s; set HEADRACE_SANDBOX=bwrap to use namespaces only"
            ) from error
    if ended.returncode != 0:
        said = ended.stderr.decode(errors="replace").strip()[-400:]
        raise InvalidConfig(
            f"sandbox level 'gvisor' does not work here: {runsc} says: {said}; set "
            "HEADRACE_SANDBOX=bwrap to use namespaces only"
        )
