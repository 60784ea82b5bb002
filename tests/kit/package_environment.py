"""Environments with packages of others, for tests that run these packages unmodified.

An environment is built once per list of packages and kept in the cache. `HEADRACE_TEST_AGENTS` names the
Python of one that has all of them.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

CACHE = Path.home() / ".cache" / "headrace" / "agents"


def python_with(packages: Sequence[str]) -> Path:
    """Return a Python that has these packages, as wheels. Skips the test without an index, except in
    CI."""
    if given := os.environ.get("HEADRACE_TEST_AGENTS"):
        return Path(given)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = hashlib.sha256("\n".join([version, *packages]).encode()).hexdigest()[:16]
    directory = CACHE / name
    python = directory / "bin" / "python"
    if not (directory / ".ready").exists():
        shutil.rmtree(directory, ignore_errors=True)
        try:
            _uv("venv", "--python", sys.executable, str(directory))
            _uv("pip", "install", "--only-binary", ":all:", "--python", str(python), *packages)
        except subprocess.CalledProcessError as error:
            text = f"these packages cannot be installed: {error.stderr.decode()[-2000:]}"
            if os.environ.get("CI"):
                raise AssertionError(text) from error
            pytest.skip(text)
        (directory / ".ready").touch()
    return python


def _uv(*arguments: str) -> None:
    """Run our own uv."""
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, *arguments, "--quiet"], check=True, capture_output=True)
