"""A target of the Makefile names every file that has a test with its mark: no test is left out of CI."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.kit.source import ROOT, relative

MAKEFILE = (ROOT / "Makefile").read_text()

PLACES = {
    "attacks": "ATTACK_TESTS",
    "gvisor": "ATTACK_TESTS",
    "gitea": "GITEA_TESTS",
    "kafka": "STACK_TESTS KILL_TESTS",
    "s3": "STACK_TESTS KILL_TESTS",
    "kills": "KILL_TESTS",
    "timed": "TIMED_TESTS",
}
"""Mark -> the Makefile's variables with the paths of its tests."""

FOLDERS = {
    "agents": "tests/agents",
    "browser": "tests/browser",
    "osmosis": "tests/osmosis",
    "vllm": "tests/vllm",
}
"""Mark -> the folder that holds all its tests, which `make test` ignores."""


def paths(variable: str) -> list[str]:
    """The paths in a variable of the Makefile."""
    found = re.search(rf"^{variable} := (.+?[^\\\\])\n", MAKEFILE, re.M | re.S)
    assert found is not None, variable
    return found[1].replace("\\\n", " ").split()


def marked(mark: str) -> list[str]:
    """The files of tests that name a mark of pytest."""
    return [
        relative(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(rf"\bmark\.{mark}\b", path.read_text())
    ]


@pytest.mark.parametrize("mark", PLACES)
def test_the_paths_of_a_target_hold_every_file_with_its_mark(mark: str) -> None:
    places = [path for variable in PLACES[mark].split() for path in paths(variable)]
    files = marked(mark)
    assert files
    assert [place for place in places if not (ROOT / place).exists()] == []
    if mark == "kills":
        places.append(FOLDERS["agents"])  # its target takes turns with its own
    assert [f for f in files if not any(Path(f).is_relative_to(p) for p in places)] == []


@pytest.mark.parametrize("mark", FOLDERS)
def test_a_folder_that_make_test_ignores_holds_only_tests_of_its_mark(mark: str) -> None:
    folder = FOLDERS[mark]
    assert f"--ignore={folder}" in MAKEFILE
    assert f"{folder} $(ARGS)" in MAKEFILE
    inside = [relative(path) for path in sorted((ROOT / folder).rglob("test_*.py"))]
    assert marked(mark) == inside


def test_make_bench_runs_benchmarks_that_exist() -> None:
    assert [name for name in paths("BENCHES") if not (ROOT / "bench" / f"{name}.py").exists()] == []


def test_the_paths_for_another_python_exist() -> None:
    assert [place for place in paths("PYTHON_TESTS") if not (ROOT / place).exists()] == []


@pytest.mark.parametrize(
    ("rest", "timed", "arguments", "fails"),
    [
        (0, 0, "", False),
        (5, 0, "-k name", False),
        (0, 5, "-k name", False),
        (5, 5, "-k name", True),
        (1, 0, "", True),
        (0, 1, "", True),
        (5, 1, "-k name", True),
        (0, 1, "tests/unit", False),
        (5, 0, "tests/unit", True),
    ],
)
def test_make_test_fails_when_a_part_fails_or_nothing_is_selected(
    rest: int, timed: int, arguments: str, fails: bool
) -> None:
    """pytest exits with 5 when it selects nothing."""
    answer = f'case "$$*" in *"-m timed"*) exit {timed};; esac; exit {rest}'
    settings = ("READY=", "PROGRAMS=true", f"PYTEST=sh -c '{answer}' sh", f"ARGS={arguments}")
    done = subprocess.run(
        ["make", "-o", "preflight", "test", *settings],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        check=False,
        capture_output=True,
    )
    assert (done.returncode != 0) is fails, done.stderr
