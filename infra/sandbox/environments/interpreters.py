"""Finds the Pythons of this machine that user code can run, and chooses one for a rollout.

A Python in a private directory, as root's own often is, is copied once into the directory of
environments, where the user of user code can reach it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from packaging.specifiers import SpecifierSet

from infra.sandbox.environments.removal import PYTHONS
from infra.sandbox.interpreter import Interpreter, find_interpreter, is_reachable
from schemas.errors import Refused

OLDEST, NEWEST = (3, 11), (3, 14)
"""The versions on which the SDK runs."""

ASK = (
    "import json,sys;print(json.dumps([list(sys.version_info[:3]),sys.base_prefix,"
    "sys.implementation.name,sys.executable]))"
)
ASK_S = 10.0
PLACES = ("/usr/local/bin", "/usr/bin", "/opt/python/bin")
TOOLS = Path("/opt/hostedtoolcache/Python")
"""Where machines of continuous integration have their Pythons."""

LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", "site-packages", "test", "idlelib", "*.a", "share", "ensurepip", "turtledemo"
)


@dataclass(frozen=True, slots=True)
class FoundPython:
    """A Python of this machine, its exact version, and the directory of its installation."""

    path: Path
    version: tuple[int, int, int]
    prefix: Path

    @property
    def minor(self) -> str:
        return f"{self.version[0]}.{self.version[1]}"

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version))


def choose_python(requires: str, path: str, named: Sequence[Path]) -> FoundPython:
    """Return the Python for a rollout: the one that user code has without packages if that fits, and
    otherwise the newest that fits. Raises Refused, with those that exist, when none fits."""
    specifier = SpecifierSet(requires)
    found = find_pythons(tuple(named))
    for python in found:
        if specifier.contains(python.text, prereleases=True):
            return python
    have = ", ".join(python.text for python in found) or "none"
    raise Refused(
        f"{path} has requires-python = {requires!r}, and this machine has the versions {have}; change "
        "it, or let the operator name another Python in HEADRACE_PYTHONS"
    )


def python_of(minor: str, named: Sequence[Path]) -> FoundPython:
    """Return the Python of a version like `3.12`. Raises Refused when there is none."""
    found = find_pythons(tuple(named))
    for python in found:
        if python.minor == minor:
            return python
    have = ", ".join(python.text for python in found) or "none"
    raise Refused(
        f"the packages of this rollout are for Python {minor}, and this machine has the versions "
        f"{have}; install it, or name one in HEADRACE_PYTHONS"
    )


@lru_cache(maxsize=8)
def find_pythons(named: tuple[Path, ...]) -> tuple[FoundPython, ...]:
    """Return the Pythons of this machine, one for each minor version: first the one that user code has
    without packages, then the others from the newest on."""
    default = ask(find_interpreter().path)
    by_minor: dict[str, FoundPython] = {}
    for candidate in (*_programs_of(named), *_candidates()):
        python = ask(candidate)
        if python is not None and OLDEST <= python.version[:2] <= NEWEST:
            by_minor.setdefault(python.minor, python)
    first = (default,) if default is not None else ()
    others = [
        python for python in by_minor.values() if python.minor not in {p.minor for p in first}
    ]
    return (*first, *sorted(others, key=lambda python: python.version, reverse=True))


def ask(path: Path) -> FoundPython | None:
    """Run a Python to learn its version. Returns None when it is not a CPython that runs."""
    try:
        ended = subprocess.run(
            [str(path), "-I", "-S", "-c", ASK],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env={},
            timeout=ASK_S,
            check=True,
        )
        version, prefix, name, executable = json.loads(ended.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    if name != "cpython":
        return None
    real = Path(executable).resolve()
    return FoundPython(real, (version[0], version[1], version[2]), Path(prefix).resolve())


def _programs_of(named: Sequence[Path]) -> Iterator[Path]:
    """The Pythons that the operator names: programs, or directories that hold them."""
    for path in named:
        if path.is_dir():
            for pattern in ("python3.1[0-9]", "bin/python3.1[0-9]", "*/bin/python3.1[0-9]"):
                yield from sorted(path.glob(pattern), reverse=True)
        else:
            yield path


def _candidates() -> Iterator[Path]:
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        for place in PLACES:
            if (path := Path(place) / f"python3.{minor}").is_file():
                yield path
    yield Path(sys.executable)
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - it never raises
    for root in (home / ".pyenv/versions", home / ".local/share/uv/python"):
        yield from sorted(root.glob("*3.1[0-9]*/bin/python3"), reverse=True)
    yield from sorted(TOOLS.glob("3.1[0-9]*/*/bin/python3"), reverse=True)


def reachable_python(python: FoundPython, directory: Path) -> Interpreter:
    """Return a Python as a sandbox gets it. One that the user of user code cannot reach is copied below
    `directory`, once."""
    if python.prefix == Path("/usr"):
        return Interpreter(python.path, ())
    if os.geteuid() != 0 or is_reachable(python.path):
        return Interpreter(python.path, (python.prefix,))
    told = python.path.stat()
    name = f"cpython-{python.text}-{told.st_mtime_ns:x}"
    place = directory / PYTHONS / name
    if not place.is_dir():
        _copy(python, place)
    os.utime(place)
    return Interpreter(place / "bin" / f"python{python.minor}", (place,))


def _copy(python: FoundPython, place: Path) -> None:
    """Copy an installation. Another process may do the same; one of the copies stays."""
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    scratch = Path(tempfile.mkdtemp(dir=place.parent, suffix=".partial"))
    try:
        scratch.chmod(0o755)
        (scratch / "bin").mkdir(mode=0o755)
        program = scratch / "bin" / f"python{python.minor}"
        shutil.copy2(python.path, program)
        shutil.copytree(python.prefix / "lib", scratch / "lib", symlinks=True, ignore=LEFT_OUT)
        _make_relocatable(program, python.prefix)
        for where, folders, _ in os.walk(scratch):
            for folder in folders:
                (Path(where) / folder).chmod(0o755)
        if ask(program) is None:
            raise Refused(
                f"a copy of {python.path} does not run; install Python {python.minor} where every user "
                "can read it"
            )
        scratch.rename(place)
    except OSError:
        if not place.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _make_relocatable(program: Path, prefix: Path) -> None:
    """Let a copied program find its shared library beside itself, wherever it was built to look."""
    former, own = f"{prefix}/lib\0".encode(), b"$ORIGIN/../lib\0"
    data = program.read_bytes()
    if former in data and len(own) <= len(former):
        program.write_bytes(data.replace(former, own.ljust(len(former), b"\0")))
