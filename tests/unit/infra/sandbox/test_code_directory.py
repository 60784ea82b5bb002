"""Unpacked user code is readable by no other user, and is removed with its process."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from infra.held_directory import HELD
from infra.sandbox.sandbox import PREFIX, code_directory
from infra.sandbox.user_process import UNPRIVILEGED

HOLDS = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from infra.sandbox.sandbox import code_directory
print(code_directory()[0], flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_others_cannot_enter_it() -> None:
    root, held = code_directory()
    os.close(held)
    status = root.stat()
    assert stat.S_IMODE(status.st_mode) & 0o007 == 0
    if os.geteuid() == 0:
        assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o710, UNPRIVILEGED)
    else:
        assert stat.S_IMODE(status.st_mode) == 0o700


def test_a_successor_removes_what_a_killed_process_left_and_nothing_else(tmp_path: Path) -> None:
    mine, held = code_directory()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        assert theirs.name.startswith(PREFIX)
        again, held_too = code_directory()
        assert mine.exists(), "its process lives: this one"
        assert theirs.exists(), "its process lives: the other"
        other.send_signal(signal.SIGKILL)
        other.wait()
    _, third = code_directory()
    assert not theirs.exists()
    assert mine.exists()
    assert again.exists()
    for descriptor in (held, held_too, third):
        os.close(descriptor)


def test_a_directory_without_a_holder_s_file_stays(tmp_path: Path) -> None:
    former = tmp_path / f"{PREFIX}former"
    former.mkdir()
    _, held = code_directory()
    assert former.exists()
    (former / HELD).touch()
    _, other = code_directory()
    assert not former.exists()
    for descriptor in (held, other):
        os.close(descriptor)
