"""`requires-python` chooses the default Python when it fits, then the newest that fits."""

from pathlib import Path

import pytest

from infra.sandbox.environments import interpreters
from infra.sandbox.environments.interpreters import (
    FoundPython,
    choose_python,
    find_pythons,
    python_of,
)
from infra.sandbox.interpreter import find_interpreter
from schemas.errors import Refused


@pytest.fixture
def pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that the operator names, with programs that say which Python they are. Only these and
    the default, 3.12.3, are on this machine."""
    default = FoundPython(Path("/default/python3.12"), (3, 12, 3), Path("/default"))
    ask = interpreters.ask
    real = find_interpreter().path

    def ask_or_default(path: Path) -> FoundPython | None:
        return default if path == real else ask(path)

    monkeypatch.setattr(interpreters, "ask", ask_or_default)
    monkeypatch.setattr(interpreters, "_candidates", lambda: iter(()))
    for minor, patch in ((14, 1), (13, 9), (12, 8), (11, 7), (10, 2)):
        program = tmp_path / f"python3.{minor}"
        said = f'[[3, {minor}, {patch}], "/opt", "cpython", "{program}"]'
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        program.chmod(0o755)
    find_pythons.cache_clear()
    return tmp_path


@pytest.mark.parametrize(
    ("requires", "chosen"),
    [
        ("", "3.12.3"),
        (">=3.11", "3.12.3"),
        (">=3.12,<3.13", "3.12.3"),
        ("==3.12.3", "3.12.3"),
        (">=3.13", "3.14.1"),
        ("!=3.12.*", "3.14.1"),
        (">=3.13,<3.14", "3.13.9"),
        ("<3.12", "3.11.7"),
    ],
)
def test_the_default_comes_first_and_then_the_newest_that_fits(
    pythons: Path, requires: str, chosen: str
) -> None:
    python = choose_python(requires, "p", [pythons])
    assert python.text == chosen
    assert python_of(python.minor, [pythons]) == python, "the one with which it is built"


@pytest.mark.parametrize("requires", [">=3.15", "<3.11", "==3.12.99"])
def test_a_refusal_names_the_pythons_of_this_machine(pythons: Path, requires: str) -> None:
    with pytest.raises(Refused) as refused:
        choose_python(requires, "rollouts/x/pyproject.toml", [pythons])
    assert f"rollouts/x/pyproject.toml has requires-python = {requires!r}" in str(refused.value)
    assert "3.12.3, 3.14.1, 3.13.9, 3.11.7" in str(refused.value)
    assert "HEADRACE_PYTHONS" in str(refused.value)
