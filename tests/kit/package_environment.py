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
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

CACHE = Path.home() / ".cache" / "headrace" / "agents"


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
    directory = CACHE / hashlib.sha256(text.encode()).hexdigest()[:16]
    python = directory / "bin" / "python"
    CACHE.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / ".ready").exists():
            shutil.rmtree(directory, ignore_errors=True)
            wheels = ("--only-binary", ":all:") if only_wheels else ()
            try:
                _uv("venv", "--python", interpreter, str(directory))
                (directory / "overrides.txt").write_text("\n".join(overrides))
                given = ("--override", str(directory / "overrides.txt"))
                where = ("--compile-bytecode", "--python", str(python))
                _uv("pip", "install", *where, *given, *wheels, *packages)
            except subprocess.CalledProcessError as error:
                _give_up(error)
            (directory / ".ready").touch()
    return python


def _give_up(error: subprocess.CalledProcessError) -> NoReturn:
    said = f"these packages cannot be installed: {error.stderr.decode()[-2000:]}"
    if os.environ.get("CI"):
        raise AssertionError(said) from error
    pytest.skip(said)


def _uv(*arguments: str) -> None:
    """Run our own uv."""
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, *arguments, "--quiet"], check=True, capture_output=True)
