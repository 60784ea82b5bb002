"""Eight commits in a row run every kill test, and none of them names a run of another test."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.kit import kill_sample
from tests.kit.kill_sample import DISTANCE, PARTS, Turn, chosen_parts, dealt, left_out, turn_of
from tests.kit.platform import git
from tests.kit.source import ROOT, modules, parse, relative

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


def commit(root: Path) -> None:
    git(root, "commit", "-q", "--allow-empty", "-m", "a commit")


def test_eight_commits_in_a_row_have_eight_different_parts(tmp_path: Path) -> None:
    passed(tmp_path)
    git(tmp_path, "init", "-q")
    parts = []
    for _ in range(PARTS + 1):
        commit(tmp_path)
        [part] = chosen_parts(SAMPLE, tmp_path) or ()
        parts.append(part)
    assert sorted(parts[:PARTS]) == list(range(PARTS))
    assert parts[PARTS] == parts[0]


def test_the_hash_chooses_in_a_shallow_clone_and_the_day_without_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, shallow, empty = (tmp_path / name for name in ("whole", "shallow", "empty"))
    for made in (whole, empty):
        made.mkdir()
    git(whole, "init", "-q")
    for _ in range(3):
        commit(whole)
    assert turn_of(whole) == (3, "commit number 3")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{whole}", str(shallow))
    sha = git(whole, "rev-parse", "HEAD")
    number, source = turn_of(shallow)
    assert number == int(sha[:8], 16)
    assert source.startswith(f"the hash of commit {sha[:8]}")
    assert turn_of(empty).source.startswith("the day ")
    monkeypatch.setenv("PATH", "")
    assert turn_of(whole).source.startswith("the day "), "without git too"


def test_twice_as_many_run_while_the_code_differs_from_that_on_which_all_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = passed(tmp_path)
    monkeypatch.setattr(kill_sample, "turn_of", lambda root: Turn(7, "a test"))
    watched.write_text("x = 2\n")
    assert chosen_parts(SAMPLE, tmp_path) == (7, (7 + DISTANCE) % PARTS)
    watched.write_text("x = 1\n")
    assert chosen_parts(SAMPLE, tmp_path) == (7,)
    (tmp_path / kill_sample.ALL_PASSED).unlink()
    assert len(chosen_parts(SAMPLE, tmp_path) or ()) == 2


TESTS = [f"tests/crash/test_{name}.py::test_y[{n}]" for name in "abc" for n in range(15)]


def test_every_test_is_in_one_part_and_parts_differ_by_one_test() -> None:
    part_of = dealt(TESTS)
    assert part_of == dealt(reversed(TESTS)), "each process deals alike"
    counted = Counter(part_of.values())
    assert counted.keys() == set(range(PARTS))
    assert max(counted.values()) - min(counted.values()) <= 1
    of_a_file = Counter(part_of[test] for test in TESTS[:15])
    assert max(of_a_file.values()) - min(of_a_file.values()) <= 1, "tests of a file are apart"


def test_a_part_leaves_out_the_other_tests_and_no_twin() -> None:
    twin = "tests/crash/test_b.py::test_twin_of_it"
    every = [*TESTS, twin]
    for part in range(PARTS):
        rest = {test for test, of in dealt(TESTS).items() if of != part}
        assert left_out(every, (part,)) == rest
    assert left_out(every, None) == set()
    assert left_out(every, ()) == set(TESTS)


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
    points = {test for test in tests if "test_failpoints.py" in test}
    assert 0 < len(points & chosen) <= -(-len(points) // PARTS)


def names_made(node: ast.AST) -> set[str]:
    """The names that it gives, as in `name="x"`."""
    given = (n.value for n in ast.walk(node) if isinstance(n, ast.keyword) and n.arg == "name")
    return {str(value.value) for value in given if isinstance(value, ast.Constant)}


def names_needed(node: ast.AST) -> set[str]:
    """The names in its references and paths, such as `x` in `x@last` and in `/runs/x`."""
    texts = [str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)]
    return set(re.findall(r"[\w-]+(?=@)|(?<=/runs/)[\w-]+", "\n".join(texts)))


def needed_of_others(module: ast.Module) -> set[str]:
    """The names that a test of a module needs and that only other tests there make."""
    tests = [node for node in module.body if getattr(node, "name", "").startswith("test_")]
    made, shared = set[str](), set[str]()
    for node in module.body:
        (made if node in tests else shared).update(names_made(node))
    return {n for t in tests for n in names_needed(t) & made - names_made(t) - shared}


def test_a_kill_test_names_no_run_that_only_another_test_makes() -> None:
    files = [path for path in modules("tests") if f"mark.{kill_sample.MARK}" in path.read_text()]
    assert {relative(path): n for path in files if (n := needed_of_others(parse(path)))} == {}
    text = 'def test_a():\n  make(name="x")\n@cases("x@last")\ndef test_b(): ...'
    assert needed_of_others(ast.parse(text)) == {"x"}
    assert needed_of_others(ast.parse(text.replace("test_a", "made"))) == set()
