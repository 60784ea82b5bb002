"""Chooses the kill tests that CI runs: an eighth of them, which depends on the commit.

They kill processes, or repeat a run on every stack. They would take half of the time of all tests,
because each waits until leases expire or processes start. So each run has a part of them, and eight
different parts have all. The twins of protections are in every run.

`make test-kills` runs all, and then notes in ALL_PASSED which code they have passed on. While the code
that they test (WATCHED) is another one, each run has two parts.
"""

import hashlib
import os
import subprocess
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

MARK = "kills"
VARIABLE = "HEADRACE_TEST_KILLS"
"""`sample` runs the part of the commit, `none` only twins, a number from 0 that part, and anything else
all."""

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


def chosen_parts(environ: Mapping[str, str], root: Path) -> tuple[int, ...] | None:
    """The parts of the kill tests to run, or None for all of them. Where there is no commit, the day
    chooses."""
    wanted = environ.get(VARIABLE, "")
    if wanted == "none":
        return ()
    if wanted.isdecimal():
        return (int(wanted) % PARTS,)
    if wanted != "sample":
        return None
    commit = _commit(root)
    first = (int(commit[:8], 16) if commit else datetime.now(UTC).toordinal()) % PARTS
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


def _commit(root: Path) -> str:
    asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def part_of(test: str) -> int:
    """The part to which a test (its node id) belongs."""
    return int(hashlib.sha256(test.encode()).hexdigest()[:8], 16) % PARTS


def is_left_out(test: str, parts: Collection[int] | None) -> bool:
    """Whether a kill test (its node id) does not run with these parts. Twins always run."""
    is_twin = test.rpartition("::")[2].startswith("test_twin")
    return parts is not None and not is_twin and part_of(test) not in parts


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the kill tests of all other parts, in place."""
    parts = chosen_parts(os.environ, config.rootpath)
    left_out = {i for i in items if i.get_closest_marker(MARK) and is_left_out(i.nodeid, parts)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def describe(config: pytest.Config) -> str:
    """What is said about the sample at the head of a run."""
    parts = chosen_parts(os.environ, config.rootpath)
    if parts is None:
        return "kill tests: all"
    if not parts:
        return "kill tests: only twins; `make test-kills` runs the others"
    chosen = " and ".join(map(str, parts))
    why = "" if len(parts) == 1 else " (two, because what they test has changed since all passed)"
    return f"kill tests: part {chosen} of {PARTS}, by the commit{why}; `make test-kills` runs all"


if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[2]
    (ROOT / ALL_PASSED).write_text(digest_of_watched(ROOT) + "\n")
