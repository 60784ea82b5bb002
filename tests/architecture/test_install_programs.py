"""One script knows which programs of the system tests need, and says what is missing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "install_programs.sh"
TOOLS = ("bash", "dirname", "id", "uname", "git", "make", "grep", "chromium", "npm")


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The variables of a machine without apt, PostgreSQL and most programs."""
    for tool in TOOLS:
        (tmp_path / tool).symlink_to(shutil.which(tool) or "/bin/true")
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "python3").chmod(0o755)
    (tmp_path / "go").write_text("#!/bin/sh\necho go version go1.27.3\n")
    (tmp_path / "go").chmod(0o755)
    return {"PATH": str(tmp_path)}


def run(variables: dict[str, str], mode: str) -> "subprocess.CompletedProcess[str]":
    bash = shutil.which("bash") or "bash"
    return subprocess.run(
        [bash, SCRIPT, mode], env=variables, capture_output=True, text=True, check=False
    )


def test_what_is_missing_is_named_in_one_line_and_tests_run_without_it(
    bare: dict[str, str],
) -> None:
    ended = run(bare, "tests")
    assert ended.returncode == 0
    (said,) = ended.stderr.splitlines()
    assert said.startswith("this machine lacks java, mvn, ")
    assert "apt-get install openjdk-17-jre-headless maven " in said
    assert said.endswith("what needs it is skipped")


def test_in_ci_nothing_may_be_missing(bare: dict[str, str]) -> None:
    ended = run({**bare, "CI": "true"}, "tests")
    assert ended.returncode == 1
    assert "this machine lacks java" in ended.stderr


def test_an_environment_needs_python_s_venv(bare: dict[str, str]) -> None:
    assert (run(bare, "venv").returncode, run(bare, "browser").returncode) == (0, 0)
    Path(bare["PATH"], "python3").write_text("#!/bin/sh\nexit 1\n")
    ended = run(bare, "venv")
    assert ended.returncode == 1
    assert "apt-get install python3-venv" in ended.stderr


def test_no_other_file_installs_programs() -> None:
    for file in (".ci/run", "Makefile"):
        assert "apt-get" not in (ROOT / file).read_text(), file
    assert os.access(SCRIPT, os.X_OK)
