"""Finds a Python for packages that need a newer one than ours may be, and makes environments with it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

CHECK = "import sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))"


def find_newer_python() -> str:
    """Return a Python 3.12 or 3.13 of this machine. Without one, the test is skipped, and in CI it
    fails."""
    for candidate in _candidates():
        if (
            subprocess.run([candidate, "-c", CHECK], capture_output=True, check=False).returncode
            == 0
        ):
            return candidate
    if os.environ.get("CI"):
        pytest.fail("this machine has no Python 3.12; install one")
    pytest.skip("this machine has no Python 3.12")


def _candidates() -> Iterator[str]:
    yield sys.executable
    for name in ("python3.12", "python3.13"):
        if found := shutil.which(name):
            yield found
    for root in (Path.home() / ".pyenv" / "versions", Path("/opt/hostedtoolcache/Python")):
        yield from (str(path) for path in sorted(root.glob("3.1[23]*/**/bin/python"))[:8])


def make_environment(
    place: Path, packages: Sequence[str], *, overrides: Sequence[str] = ()
) -> Path:
    """Install packages into a new environment below `place`. Returns its Python."""
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "-q", "--python", find_newer_python(), place / "venv"], check=True)
    python = place / "venv" / "bin" / "python"
    (place / "overrides.txt").write_text("\n".join(overrides))
    subprocess.run(
        [
            *(uv, "pip", "install", "-q", "--compile-bytecode", "--python", str(python)),
            *("--override", str(place / "overrides.txt"), *packages),
        ],
        check=True,
    )
    return python
