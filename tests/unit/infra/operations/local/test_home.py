"""A home is private and has one owner at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.operations.local import home
from schemas.errors import Conflict, InvalidConfig

HOLD = """
import sys, pathlib
from infra.operations.local import home
with home.own(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_home_and_api_key_are_private_and_the_api_key_stays(tmp_path: Path) -> None:
    place = tmp_path / "a" / "home"
    home.prepare(place)
    api_key = (place / "token").read_text()
    assert place.stat().st_mode & 0o777 == 0o700
    assert (place / "token").stat().st_mode & 0o777 == 0o600
    assert len(api_key.strip()) > 40
    home.prepare(place)
    assert (place / "token").read_text() == api_key


def test_a_home_that_was_open_is_closed_again(tmp_path: Path) -> None:
    home.prepare(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "token").chmod(0o644)
    home.prepare(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_a_file_in_the_place_of_a_home_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(InvalidConfig, match="HEADRACE_HOME"):
        home.prepare(tmp_path / "home")


def test_a_second_owner_is_refused_and_told_the_pid_of_the_first(tmp_path: Path) -> None:
    home.prepare(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    assert home.owner(tmp_path) == holder.pid
    with pytest.raises(Conflict, match=rf"pid {holder.pid}\)"), home.own(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    assert home.owner(tmp_path) is None
    with home.own(tmp_path):
        assert (tmp_path / home.LOCK).read_text().strip() == str(os.getpid())


def test_a_state_counts_only_while_its_supervisor_lives(tmp_path: Path) -> None:
    home.prepare(tmp_path)
    child = home.ChildState("worker", 7, "w", 1, "log")
    state = home.SupervisorState(os.getpid(), "http://x", True, "now", 5, (child,))
    assert home.read_state(tmp_path) is None
    with home.own(tmp_path):
        home.write_state(tmp_path, state)
        assert home.read_state(tmp_path) == state
        document = json.loads((tmp_path / home.STATE).read_text())
        (tmp_path / home.STATE).write_text(json.dumps({**document, "pid": 1}))
        assert home.read_state(tmp_path) is None
    assert home.read_state(tmp_path) is None
