"""Environments with packages of others, for tests that run these packages unmodified.

An environment is built once per list of packages and kept in the cache, where the processes of a test
session share it. `HEADRACE_TEST_AGENTS` names the Python of one that has all packages of the clients.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

CACHE = Path.home() / ".cache" / "headrace" / "agents"
SHARED = Path("/var/tmp/headrace-test-environments")


@pytest.fixture(scope="session", autouse=True)
def kept_environments() -> Iterator[None]:
    """The environments of rollouts are kept between test sessions, where user code can read them."""
    directory = SHARED if os.geteuid() == 0 else CACHE / "environments"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_ENVIRONMENTS", str(directory))
        yield


def python_with(packages: Sequence[str]) -> Path:
    """Return a Python of our version that has these packages, as wheels. Skips the test without an
    index, except in CI."""
    if given := os.environ.get("HEADRACE_TEST_AGENTS"):
        return Path(given)
    return shared_environment(packages, interpreter=sys.executable, only_wheels=True)


def shared_environment(
    packages: Sequence[str],
    *,
    interpreter: str,
    overrides: Sequence[str] = (),
    only_wheels: bool = False,
) -> Path:
    """Return the Python of an environment with these packages, which one process builds. Skips the test
    without an index, except in CI."""
    text = "\n".join([interpreter, *packages, "", *overrides])
    wheels = ("--only-binary", ":all:") if only_wheels else ()

    def install(python: Path) -> None:
        listed = python.parents[1] / "overrides.txt"
        listed.write_text("\n".join(overrides))
        _install(python, "--override", str(listed), *wheels, *packages)

    return _kept_environment(text, interpreter, install)


def locked_environment(lock: Path, *, interpreter: str) -> Path:
    """Return the Python of an environment with the packages of a lock, whose hashes are checked. Skips
    the test without an index, except in CI."""

    def install(python: Path) -> None:
        _install(python, "--require-hashes", "--only-binary", ":all:", "-r", str(lock))

    return _kept_environment(f"{interpreter}\n{lock.read_text()}", interpreter, install)


def _kept_environment(text: str, interpreter: str, install: Callable[[Path], None]) -> Path:
    """The Python of the environment that `text` describes. One process builds it."""
    directory = CACHE / hashlib.sha256(text.encode()).hexdigest()[:16]
    python = directory / "bin" / "python"
    CACHE.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / ".ready").exists():
            shutil.rmtree(directory, ignore_errors=True)
            try:
                _uv("venv", "--python", interpreter, str(directory))
                install(python)
            except subprocess.CalledProcessError as error:
                _give_up(error)
            (directory / ".ready").touch()
    return python


def _install(python: Path, *arguments: str) -> None:
    _uv("pip", "install", "--compile-bytecode", "--python", str(python), *arguments)


def _give_up(error: subprocess.CalledProcessError) -> NoReturn:
    said = f"these packages cannot be installed: {error.stderr.decode()[-2000:]}"
    if os.environ.get("CI"):
        raise AssertionError(said) from error
    pytest.skip(said)


def _uv(*arguments: str) -> None:
    """Run our own uv."""
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, *arguments, "--quiet"], check=True, capture_output=True)
