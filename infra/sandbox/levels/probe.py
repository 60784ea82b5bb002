"""Chooses the level at which this process confines user code, and tests that it works here.

There is no other level to fall back to. A level that does not work here is an error that says why.
"""

import os
import shutil
import subprocess
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from infra.sandbox.levels.bubblewrap import BubblewrapLevel
from infra.sandbox.levels.bubblewrap_errors import explain, missing
from infra.sandbox.levels.bubblewrap_options import build, encode
from infra.sandbox.levels.gvisor import GVisorLevel
from infra.sandbox.levels.gvisor_program import find_runsc
from infra.sandbox.levels.level import ConfinedCommand, Level
from infra.sandbox.levels.process import ProcessLevel
from infra.sandbox.user_process import UNPRIVILEGED

PROBE_S = 20.0
BUBBLEWRAP = "bwrap"
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
    """Return the path of bubblewrap after one start in which it confined a program. Raises InvalidConfig
    when that is impossible here."""
    found = shutil.which(BUBBLEWRAP, path=PLACES)
    if found is None:
        raise missing()
    with ExitStack() as held:
        options = build(ConfinedCommand(["true"], {}, Path("/")), held, counted=False)
        descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC)
        held.callback(os.close, descriptor)
        os.write(descriptor, encode(options.arguments))
        os.lseek(descriptor, 0, os.SEEK_SET)
        confined = os.geteuid() == 0
        try:
            ended = subprocess.run(
                [found, "--args", str(descriptor), "--", "/bin/true"],
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
    if ended.returncode != 0:
        raise explain(ended.stderr.decode(errors="replace"))
    return Path(found)
