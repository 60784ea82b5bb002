"""Chooses the kill tests that `make test` runs: an eighth of them, which depends on the commit.

They take half of the time of all tests, because each waits until leases expire and processes start
again. So each run has a part of them, and eight different parts have all. The twins of protections are
in every run. `make test-kills` runs all.
"""

import hashlib
import os
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

MARK = "kills"
VARIABLE = "HEADRACE_TEST_KILLS"
"""`sample` runs the part of the commit, a number from 0 that part, and anything else all."""

PARTS = 8


def chosen_part(environ: Mapping[str, str], root: Path) -> int | None:
    """The part of the kill tests to run, or None for all of them. Where there is no commit, the part is
    that of the day."""
    wanted = environ.get(VARIABLE, "")
    if wanted.isdecimal():
        return int(wanted) % PARTS
    if wanted != "sample":
        return None
    commit = _commit(root)
    return (int(commit[:8], 16) if commit else datetime.now(UTC).toordinal()) % PARTS


def _commit(root: Path) -> str:
    asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def part_of(test: str) -> int:
    """The part to which a test (its node id) belongs."""
    return int(hashlib.sha256(test.encode()).hexdigest()[:8], 16) % PARTS


def is_left_out(test: str, part: int | None) -> bool:
    """Whether a kill test (its node id) does not run with this part. Twins always run."""
    is_twin = test.rpartition("::")[2].startswith("test_twin")
    return part is not None and not is_twin and part_of(test) != part


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the kill tests of all other parts, in place."""
    part = chosen_part(os.environ, config.rootpath)
    left_out = {i for i in items if i.get_closest_marker(MARK) and is_left_out(i.nodeid, part)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def describe(config: pytest.Config) -> str:
    """What is said about the sample at the head of a run."""
    part = chosen_part(os.environ, config.rootpath)
    if part is None:
        return "kill tests: all"
    return f"kill tests: part {part} of {PARTS}, by the commit; `make test-kills` runs all"
