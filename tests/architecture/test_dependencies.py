"""Dependencies: ranges in pyproject.toml, exact versions with hashes in constraints.txt and locks/."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("locks/build.txt", "locks/control.txt", "locks/worker.txt", "locks/venv.txt")
APART = ("$(VLLM)/bin/python", "$(TOOLS)/bin/python", ".go/bin/pip")
"""Environments that are not Headrace's: real vLLM, tools of CI, and Go for the tests' S3 store."""


@dataclass(frozen=True)
class Pin:
    """An entry of a lock."""

    version: str
    marker: str
    hashes: frozenset[str]


def pins(name: str) -> dict[str, Pin]:
    """Normalised name -> entry of a lock. Fails on anything that is not a version with hashes."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(
            r"([\w.-]+)==([\w.+!]+)( ; [^-]*?)? ((?: *--hash=sha256:\w{64})+)", line
        )
        assert match is not None, f"{name}: not an exact version with hashes: {line!r}"
        package, version, marker, hashes = match.groups()
        found[str(canonicalize_name(package))] = Pin(
            version, marker or "", frozenset(hashes.split())
        )
    return found


@cache
def project() -> dict[str, Any]:
    document: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return document


def requirements(*extras: str) -> Iterator[Requirement]:
    """The requirements of pyproject.toml with these extras."""
    for line in project()["dependencies"]:
        yield Requirement(line)
    for extra in extras:
        for line in project()["optional-dependencies"][extra]:
            asked = Requirement(line)
            if asked.name == "headrace":
                yield from requirements(*asked.extras)
            else:
                yield asked


EXACT = {
    "renderers": "its version decides the ids of prompts, so a newer one changes runs",
    "llguidance": "its version decides the token masks of forced answers, which a log must give again",
}
"""Packages that have one version in pyproject.toml, and why."""


def test_every_dependency_is_a_range_that_allows_what_is_locked() -> None:
    locked = pins("constraints.txt")
    for asked in requirements(*project()["optional-dependencies"]):
        operators = {specifier.operator for specifier in asked.specifier}
        if asked.name in EXACT:
            assert operators == {"=="}, f"{asked} is not exact: {EXACT[asked.name]}"
            continue
        assert operators in ({">="}, {">=", "<"}), f"{asked} is not a range"
        assert asked.specifier.contains(locked[canonicalize_name(asked.name)].version), str(asked)


@pytest.mark.parametrize("name", LOCKS)
def test_the_locks_agree_on_versions_and_hashes(name: str) -> None:
    whole = pins("constraints.txt")
    for package, pin in pins(name).items():
        assert (whole[package].version, whole[package].hashes) == (pin.version, pin.hashes), package


def recipe() -> dict[str, list[str]]:
    """Lock -> the arguments that `make lock` makes it with."""
    text = (ROOT / "Makefile").read_text()
    lines = [shlex.split(line) for line in re.findall(r"^\t\$\(LOCK\) (.*)$", text, re.M)]
    return {line[0]: line[1:] for line in lines}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_what_its_extras_ask_for(name: str) -> None:
    made_with = recipe()[name]
    extras = [made_with[i + 1] for i, word in enumerate(made_with) if word == "--extra"]
    missing = set()
    if "pyproject.toml" in made_with:
        missing = {str(canonicalize_name(one.name)) for one in requirements(*extras)} - set(
            pins(name)
        )
    if "locks/build.in" in made_with:
        missing |= {"editables", "hatchling", "uv"} - set(pins(name))
    assert not missing, "run `make lock`"


def test_installs_from_the_network_check_hashes() -> None:
    """An install is either of a lock, with hashes, or of our own source without dependencies."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    for name in ("BOOTSTRAP", "INSTALL"):
        command = re.search(rf"^{name} :?= (.*)$", makefile, re.M)
        assert command is not None
        makefile = makefile.replace(command.group(0), "").replace(f"$({name})", command.group(1))
    installs = [
        line.strip()
        for text in (makefile, (ROOT / ".ci" / "run").read_text())
        for line in text.splitlines()
        if "pip install" in line and not any(apart in line for apart in APART)
    ]
    ours = [line for line in installs if line.startswith("$(BIN)")]
    assert len(ours) == 5
    assert installs == ours
    for line in ours:
        own = line.endswith("--no-deps --no-build-isolation -e .")
        assert own or "--require-hashes" in line, line


OLD = "sys.version_info = (3, 10, 13, 'final', 0); sys.version = '3.10.13 (main)'"


@pytest.mark.processes
@pytest.mark.parametrize("module", ["producers.cli.main", "consumers.__main__"])
def test_an_old_python_is_refused_with_one_clear_line(module: str) -> None:
    program = f"import sys; {OLD}; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("Headrace needs Python 3.11 or newer; this is Python 3.10.13")


@pytest.mark.processes
def test_make_refuses_an_old_python_before_it_installs_anything(tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; {OLD}; exec(sys.argv[2])" "$@"\n'
    )
    old.chmod(0o755)
    place = tmp_path / "venv"
    done = subprocess.run(
        ["make", "--silent", "venv", f"PYTHON={old}", f"VENV={place}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Headrace needs Python 3.11 or newer" in done.stdout
    assert not place.exists()
