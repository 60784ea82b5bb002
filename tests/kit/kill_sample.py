"""Chooses the kill tests that CI runs: an eighth of them, and the next eighth for the next commit.

They kill processes, or try a fault, a variant, a stack or a package with a whole run. They would take
half of the time of all tests, because each waits until leases expire or processes start. So each run has
a part of them. The number of commits chooses it, so eight commits in a row have all. The twins of
protections are in every run.

`make test-gitea` and `make test-agents` run all of theirs. `make test-kills` runs all others, and then
notes in ALL_PASSED which code they have passed on. While the code that they test (WATCHED) is another
one, each run has two parts.
"""

import hashlib
import os
import subprocess
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest

MARK = "kills"
VARIABLE = "HEADRACE_TEST_KILLS"
"""`sample` runs the part whose turn it is, `none` only twins, a number from 0 that part, and anything
else all."""

PARTS = 8
DISTANCE = 3
"""From a part to the second one, if there are two."""

WATCHED = (
    "infra/spine/**/*.py",
    "infra/spine/**/*.sql",
    "infra/failpoints.py",
    "consumers/**/*.py",
)
"""The spine, the failpoints and the consumers."""

ALL_PASSED = "tests/crash/all_passed.sha256"


class Turn(NamedTuple):
    """A number, of which each part has its turn in every eighth, and where it comes from."""

    number: int
    source: str


def turn_of(root: Path) -> Turn:
    """The number of commits up to this one. A shallow clone lacks commits, so there it is the commit's
    hash. Where there is no commit it is the day."""
    if _git(root, "rev-parse", "--is-shallow-repository") == "false" and (
        count := _git(root, "rev-list", "--count", "HEAD")
    ):
        return Turn(int(count), f"commit number {count}")
    if commit := _git(root, "rev-parse", "HEAD"):
        return Turn(
            int(commit[:8], 16), f"the hash of commit {commit[:8]}, because it has no number"
        )
    day = datetime.now(UTC)
    return Turn(day.toordinal(), f"the day {day:%Y-%m-%d}, because there is no commit")


def chosen_parts(environ: Mapping[str, str], root: Path) -> tuple[int, ...] | None:
    """The parts of the kill tests to run, or None for all of them."""
    wanted = environ.get(VARIABLE, "")
    if wanted == "none":
        return ()
    if wanted.isdecimal():
        return (int(wanted) % PARTS,)
    if wanted != "sample":
        return None
    first = turn_of(root).number % PARTS
    return (first,) if have_passed(root) else (first, (first + DISTANCE) % PARTS)


def have_passed(root: Path) -> bool:
    """Whether all kill tests have passed on the code that they test as it is now."""
    noted = root / ALL_PASSED
    return noted.exists() and noted.read_text().strip() == digest_of_watched(root)


def digest_of_watched(root: Path) -> str:
    """The hash of the files that kill tests test."""
    found = sorted({path for pattern in WATCHED for path in root.glob(pattern)})
    whole = hashlib.sha256()
    for path in found:
        whole.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return whole.hexdigest()


def _git(root: Path, *arguments: str) -> str:
    """The answer of git, or an empty text if it has none."""
    try:
        found = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def dealt(tests: Iterable[str]) -> dict[str, int]:
    """The part to which each test (its node id) belongs. They are dealt like cards, so that parts differ
    by one test at most, and the tests of a file, which take about as long, are in different parts."""
    return {test: index % PARTS for index, test in enumerate(sorted(set(tests)))}


def is_twin(test: str) -> bool:
    """Whether a test (its node id) is the twin of a protection, which always runs."""
    return test.rpartition("::")[2].startswith("test_twin")


def left_out(tests: Iterable[str], parts: Collection[int] | None) -> set[str]:
    """The kill tests (node ids) that do not run with these parts."""
    if parts is None:
        return set()
    part_of = dealt(test for test in tests if not is_twin(test))
    return {test for test, part in part_of.items() if part not in parts}


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the kill tests of all other parts, in place."""
    parts = chosen_parts(os.environ, config.rootpath)
    others = left_out((i.nodeid for i in items if i.get_closest_marker(MARK)), parts)
    if others:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
        items[:] = [item for item in items if item.nodeid not in others]


def describe(config: pytest.Config) -> str:
    """What is said about the sample at the head of a run."""
    parts = chosen_parts(os.environ, config.rootpath)
    if parts is None:
        return "kill tests: all"
    if not parts:
        return "kill tests: only twins; `make test-kills` runs the others"
    chosen = " and ".join(map(str, parts))
    asked = os.environ[VARIABLE]
    by = turn_of(config.rootpath).source if asked == "sample" else f"{VARIABLE}={asked}"
    why = "" if len(parts) == 1 else " (two, because what they test has changed since all passed)"
    return f"kill tests: part {chosen} of {PARTS}, by {by}{why}; `make test-kills` runs all"


if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[2]
    (ROOT / ALL_PASSED).write_text(digest_of_watched(ROOT) + "\n")
