"""Starts the harness as this user, or as one without rights, and returns what it found."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.escapes.neighbour import python_of_victims

ROOT = Path(__file__).resolve().parents[2]
UNPRIVILEGED_TESTER = 61_000
"""The user that the harness runs as when we are root and want to see it without rights. A number of
this process is added, so that two test runs do not share a user."""

MOST_S = 240.0


@dataclass(frozen=True)
class Outcome:
    """What a run of the corpus found: attack -> family, attack -> effects, and how long it took."""

    attacks: Mapping[str, str]
    effects: Mapping[str, Sequence[str]]
    seconds: float


def run_corpus(
    level: str, *, is_root: bool, families: Sequence[str] = (), runsc: Path | None = None
) -> Outcome:
    """Run the corpus at a level, in a process of its own with a directory of its own."""
    user = None if is_root or os.geteuid() != 0 else UNPRIVILEGED_TESTER + os.getpid() % 4000
    token = secrets.token_hex(6)
    directory = Path(tempfile.mkdtemp(prefix="escapes-"))
    directory.chmod(0o755)
    private = directory / "tmp"
    private.mkdir()
    if user is not None:
        os.chown(private, user, user)
    python = sys.executable if user is None else python_of_victims()
    try:
        done = subprocess.run(
            [python, "-m", "tests.escapes.harness", level, *families],
            cwd=ROOT,
            env={
                "PATH": os.environ["PATH"],
                "TMPDIR": str(private),
                "HOME": str(private),
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p and Path(p).is_dir()),
                "PYTHONDONTWRITEBYTECODE": "1",
                "TOKEN": token,
                "HEADRACE_API_KEY": f"mark-{token}-{secrets.token_hex(8)}",
                **({} if runsc is None else {"HEADRACE_RUNSC": str(_copy(runsc, directory))}),
            },
            user=user,
            group=user,
            extra_groups=None if user is None else (),
            capture_output=True,
            text=True,
            timeout=MOST_S,
            check=False,
            start_new_session=True,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    assert done.returncode == 0, f"the harness ended with {done.returncode}: {done.stderr[-4000:]}"
    told = json.loads(done.stdout)
    if os.environ.get("VERBOSE"):
        sys.stderr.write(
            json.dumps([told["found"], told["slowest"]], indent=1) + done.stderr[-3000:]
        )
    return Outcome(told["attacks"], told["effects"], told["seconds"])


def _copy(program: Path, directory: Path) -> Path:
    """The program where every user can run it."""
    target = Path(shutil.copy(program, directory / "runsc"))
    target.chmod(0o755)
    return target
