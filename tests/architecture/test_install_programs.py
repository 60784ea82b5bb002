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


def test_missing_programs_are_named_in_one_line_and_tests_run_without_them(
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


VENVLESS = """#!/bin/sh
case "$2" in
*ensurepip*) test -e "$0.venv" ;;
*) echo python3.12-venv ;;
esac
"""
"""Python of a fresh Debian or Ubuntu, whose venv is a package of its own."""


@pytest.mark.parametrize("mode", ["venv", "demo", "tests", "browser"])
def test_nothing_is_installed_without_python_s_venv(bare: dict[str, str], mode: str) -> None:
    Path(bare["PATH"], "python3").write_text(VENVLESS)
    ended = run(bare, mode)
    assert ended.returncode == 1
    (said,) = ended.stderr.splitlines()
    assert said == (
        "this machine lacks Python's venv (Debian: apt-get install python3.12-venv); "
        "nothing was installed"
    )
    assert ended.stdout == ""


def test_root_gets_python_s_venv_before_the_rest(bare: dict[str, str]) -> None:
    """Go comes from Python's index, through an environment."""
    tools = Path(bare["PATH"])
    (tools / "python3").write_text(VENVLESS)
    (tools / "id").unlink()
    (tools / "id").write_text("#!/bin/sh\necho 0\n")
    (tools / "apt-get").write_text(
        f'#!/bin/sh\necho "$@" >> {tools}/asked\ncase "$*" in *venv*) : > {tools}/python3.venv ;; esac\n'
    )
    for tool in ("id", "apt-get"):
        (tools / tool).chmod(0o755)
    ended = run(bare, "tests")
    assert ended.returncode == 0, ended.stderr
    asked = [line for line in (tools / "asked").read_text().splitlines() if "install" in line]
    assert asked[0] == "install -y -qq python3.12-venv"
    assert "openjdk-17-jre-headless" in asked[1]
    assert "golang-go" not in asked[1]


def test_no_other_file_installs_programs() -> None:
    for file in (".ci/run", "Makefile"):
        assert "apt-get" not in (ROOT / file).read_text(), file
    assert os.access(SCRIPT, os.X_OK)
