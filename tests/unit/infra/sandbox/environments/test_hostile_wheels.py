"""Hostile wheels are installed harmlessly or refused by name, and nothing outside changes: where the
platform runs as root, and where it runs as an ordinary user, whose files user code has the user of."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from infra.sandbox.environments.interpreters import find_pythons
from tests.escapes.neighbour import python_of_victims
from tests.escapes.run_corpus import ROOT, UNPRIVILEGED_TESTER
from tests.unit.infra.sandbox.environments import hostile_wheels
from tests.unit.infra.sandbox.environments.hostile_wheels import AIMED, WHEELS, open_machine

pytestmark = pytest.mark.attacks

CORPUS = hostile_wheels.__name__
USERS = ("root", "ordinary")


def install_all(user: str, *python: str) -> dict[str, list[str]]:
    """Install all wheels as root, or as a user without rights. Returns the problems of each. With the
    program of a Python, those are installed that aim at the start of one."""
    uid = UNPRIVILEGED_TESTER + os.getpid() % 4000 if user != "root" and not os.geteuid() else None
    place = Path(tempfile.mkdtemp(prefix="headrace-wheels-", dir="/tmp"))
    place.chmod(0o755)
    if uid is not None:
        os.chown(place, uid, uid)
    try:
        done = subprocess.run(
            [sys.executable if uid is None else python_of_victims(), "-m", CORPUS, *python],
            cwd=ROOT,
            env={
                "PATH": os.environ["PATH"],
                "TMPDIR": str(place),
                "HOME": str(place),
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p and Path(p).is_dir()),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            user=uid,
            group=uid,
            extra_groups=None if uid is None else (),
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_the_corpus_is_large() -> None:
    assert len(WHEELS) == 55, "docs/security.md says so"


@pytest.mark.parametrize("user", [u for u in USERS if u != "root" or os.geteuid() == 0])
def test_a_hostile_wheel_has_its_answer_and_no_effect(user: str) -> None:
    found = install_all(user)
    assert list(found) == list(WHEELS)
    assert {name: problems for name, problems in found.items() if problems} == {}


@pytest.mark.parametrize("minor", ["3.12", "3.13"])
def test_a_wheel_that_aims_at_another_python_has_no_effect(minor: str) -> None:
    others = {python.minor: python.path for python in find_pythons(())[1:]}
    if minor not in others:  # a machine needs one Python; .ci/run ends without 3.12
        pytest.skip(f"this machine has no Python {minor} besides its default")
    found = install_all("root" if os.geteuid() == 0 else "ordinary", str(others[minor]))
    assert list(found) == list(AIMED)
    assert {name: problems for name, problems in found.items() if problems} == {}


async def test_without_the_check_a_package_chooses_the_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The twin: the package's configuration stays, although its code did not run."""
    monkeypatch.setattr("infra.sandbox.environments.environments.check_reserved", lambda *_: None)
    with open_machine() as machine:
        before = machine.look()
        env = await machine.install(WHEELS["its own configuration and library"])
        assert (env / "pyvenv.cfg").read_text() == "home = env/evil/bin\n"
        assert machine.look() == before
