"""A program in a private directory is copied to where user code's user can execute it."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.sandbox.levels import reachable_program
from infra.sandbox.levels.reachable_program import reachable_copy
from infra.sandbox.user_process import UNPRIVILEGED

FILES = ["package/bin/program", "package.libs/library"]

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root has another user for user code"
)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of copies."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        monkeypatch.setattr(reachable_program, "PLACES", (Path(directory),))
        yield Path(directory)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A private directory with a program that needs a file beside it."""
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / FILES[0]).write_text(
        '#!/bin/sh\ncat "$(dirname "$0")/../../package.libs/library"\n'
    )
    (tmp_path / FILES[1]).write_text("found")
    (tmp_path / FILES[0]).chmod(0o755)
    tmp_path.chmod(0o700)
    return tmp_path


def run(program: Path) -> str:
    user = UNPRIVILEGED
    return subprocess.run(
        [program], user=user, group=user, extra_groups=(), cwd="/", capture_output=True, text=True
    ).stdout


def test_a_private_program_runs_from_a_copy_with_what_it_needs(private: Path, place: Path) -> None:
    copy = reachable_copy(private, FILES, name="it")
    assert copy.parent == place
    assert run(copy / FILES[0]) == "found"
    with pytest.raises(PermissionError):
        run(private / FILES[0])
    assert reachable_copy(private, FILES, name="it") == copy, "it is made once"
    assert list(place.iterdir()) == [copy]


def test_a_program_that_everybody_can_run_is_not_copied(place: Path) -> None:
    assert reachable_copy(Path("/bin"), ["sh"], name="it") == Path("/bin").resolve()
    assert not list(place.iterdir())


@pytest.mark.parametrize("weakness", ["owner", "writable", "missing"])
def test_a_copy_that_others_may_have_made_is_not_used(
    private: Path, place: Path, weakness: str
) -> None:
    copy = reachable_copy(private, FILES, name="it")
    if weakness == "owner":
        os.chown(copy, UNPRIVILEGED, UNPRIVILEGED)
    elif weakness == "writable":
        (copy / FILES[1]).parent.chmod(0o777)
    else:
        (copy / FILES[1]).unlink()
    again = reachable_copy(private, FILES, name="it")
    assert again != copy
    assert run(again / FILES[0]) == "found"
