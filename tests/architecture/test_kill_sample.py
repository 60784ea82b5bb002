"""Eight runs of CI with eight different parts run every kill test."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.kit import kill_sample
from tests.kit.kill_sample import DISTANCE, PARTS, chosen_parts, is_left_out, part_of
from tests.kit.source import ROOT

SAMPLE = {"HEADRACE_TEST_KILLS": "sample"}


def passed(root: Path) -> Path:
    """A folder with a file that kill tests test, on which all of them have passed; that file."""
    watched = root / "infra" / "failpoints.py"
    watched.parent.mkdir()
    watched.write_text("x = 1\n")
    noted = root / kill_sample.ALL_PASSED
    noted.parent.mkdir(parents=True)
    noted.write_text(kill_sample.digest_of_watched(root) + "\n")
    return watched


def test_the_variable_says_which_part_runs(tmp_path: Path) -> None:
    assert chosen_parts({}, ROOT) is None
    assert chosen_parts({"HEADRACE_TEST_KILLS": "all"}, ROOT) is None
    assert chosen_parts({"HEADRACE_TEST_KILLS": "11"}, ROOT) == (3,)
    assert chosen_parts({"HEADRACE_TEST_KILLS": "none"}, ROOT) == ()
    assert chosen_parts(SAMPLE, ROOT) == chosen_parts(SAMPLE, ROOT)
    passed(tmp_path)
    [part] = chosen_parts(SAMPLE, tmp_path) or ()
    assert part in range(PARTS), "without a commit too"


def test_the_part_follows_from_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed(tmp_path)
    for number in range(PARTS):
        monkeypatch.setattr(kill_sample, "_commit", lambda root, n=number: f"0000000{n}" + "a" * 32)
        assert chosen_parts(SAMPLE, tmp_path) == (number,)


def test_twice_as_many_run_while_the_code_differs_from_that_on_which_all_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = passed(tmp_path)
    monkeypatch.setattr(kill_sample, "_commit", lambda root: "7" * 40)
    watched.write_text("x = 2\n")
    assert chosen_parts(SAMPLE, tmp_path) == (7, (7 + DISTANCE) % PARTS)
    watched.write_text("x = 1\n")
    assert chosen_parts(SAMPLE, tmp_path) == (7,)
    (tmp_path / kill_sample.ALL_PASSED).unlink()
    assert len(chosen_parts(SAMPLE, tmp_path) or ()) == 2


def test_every_test_is_in_one_part_and_the_parts_are_alike() -> None:
    counted = Counter(part_of(f"tests/crash/test_x.py::test_y[{n}]") for n in range(800))
    assert sum(counted.values()) == 800
    assert all(60 <= counted[part] <= 140 for part in range(PARTS))


def test_a_part_leaves_out_the_other_tests_and_no_twin() -> None:
    killing, twin = "tests/crash/test_x.py::test_kills[1]", "tests/crash/test_x.py::test_twin_of_it"
    for part in range(PARTS):
        assert is_left_out(killing, (part,)) == (part != part_of(killing))
        assert not is_left_out(twin, (part,))
    assert not is_left_out(killing, None)
    assert is_left_out(killing, ())
    assert not is_left_out(twin, ())


def test_only_marked_tests_are_left_out() -> None:
    """Asked of pytest itself, about a folder that has both."""
    asked = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    found = {}
    for part in ("0", "all"):
        environment = {**os.environ, "HEADRACE_TEST_KILLS": part}
        listed = subprocess.run(
            [*asked, "tests/crash"], cwd=ROOT, env=environment, capture_output=True, check=True
        )
        found[part] = set(listed.stdout.decode().splitlines())
    tests = {line for line in found["all"] if "::" in line}
    chosen = found["0"] & tests
    assert {
        test for test in tests if "test_late_claims.py" in test or "test_twin" in test
    } <= chosen
    assert {test for test in chosen if "test_failpoints.py" in test} == {
        test for test in tests if "test_failpoints.py" in test and part_of(test) == 0
    }
