"""Modules hold one idea each: their sizes say whether that is still so."""

import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("schemas", "trainer", "infra", "consumers", "producers", "headrace")

LONGEST = 500
MEDIAN = 150


def sizes() -> dict[str, int]:
    """Path -> number of lines, for all modules that hold something."""
    found = {}
    for root in ROOTS:
        for path in (ROOT / root).rglob("*.py"):
            if num_lines := len(path.read_text().splitlines()):
                found[str(path.relative_to(ROOT))] = num_lines
    return found


def test_no_module_is_over_500_lines() -> None:
    long = {name: size for name, size in sizes().items() if size > LONGEST}
    assert not long


def test_the_median_module_is_under_150_lines() -> None:
    assert statistics.median(sizes().values()) < MEDIAN


def test_nothing_is_called_utils_or_common() -> None:
    names = {Path(name).stem for name in sizes()}
    assert not names & {"utils", "util", "common", "helpers", "misc"}


CATALOGUES = ("schemas/events/__init__.py", "schemas/effects/__init__.py")
"""They list all events and all effects."""

REFUSES_OLD_PYTHON = ("schemas/__init__.py", "producers/__init__.py", "consumers/__init__.py")
"""Modules that an entry point imports before any library."""


def test_init_modules_are_empty_but_the_sdk_s_and_the_check_of_python() -> None:
    for root in ROOTS:
        for path in (ROOT / root).rglob("__init__.py"):
            if str(path.relative_to(ROOT)) in CATALOGUES:
                continue
            if str(path.relative_to(ROOT)) in REFUSES_OLD_PYTHON:
                assert len(path.read_text().splitlines()) < 12
            elif path.relative_to(ROOT).parts[0] != "headrace":
                assert path.read_text() == "", path
