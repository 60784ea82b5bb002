"""Before anything is installed, one sentence says that user code cannot be confined here."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from infra.sandbox.levels import preflight, probe
from tests.unit.infra.sandbox.levels.test_probe import install, programs

__all__ = ["programs"]
ROOT = Path(__file__).resolve().parents[5]


def absent(name: str) -> None:
    raise PackageNotFoundError(name)


@pytest.fixture
def package_comes(monkeypatch: pytest.MonkeyPatch, programs: Path) -> None:
    """No bubblewrap here, and the installation will bring one."""
    monkeypatch.setattr(probe, "distribution", absent)
    monkeypatch.setattr(preflight, "distribution", absent)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))


def test_it_needs_the_standard_library_only(tmp_path: Path) -> None:
    """`-S` hides all packages, as on a fresh machine."""
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "infra.sandbox.levels.preflight"],
        cwd=ROOT,
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.usefixtures("package_comes")
def test_a_package_that_will_be_installed_is_enough() -> None:
    assert preflight.find_obstacle() is None


@pytest.mark.usefixtures("package_comes")
def test_it_is_not_enough_where_the_kernel_makes_no_namespaces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse = ("sh", "-c", "echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1")
    monkeypatch.setattr(preflight, "NAMESPACES", refuse)
    assert preflight.main() == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("nothing was installed: bubblewrap cannot confine user code here")
    assert "Operation not permitted" in said
    assert "process-trusted" not in said, "the demo's push is refused at that level"


@pytest.mark.usefixtures("package_comes")
def test_a_machine_without_a_package_is_told_to_install_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "apt-get install bubblewrap" in str(preflight.find_obstacle())


def test_a_bubblewrap_that_works_is_not_tried_further(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(programs, "exit 0")
    monkeypatch.setattr(preflight, "distribution", lambda name: pytest.fail(name))
    assert preflight.find_obstacle() is None
