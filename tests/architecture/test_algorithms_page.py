"""docs/algorithms.md: every objective has its screen, its defaults are the code's, its tests exist."""

import re
from pathlib import Path

from schemas.algorithms import READ_BY, REINFORCED

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()


def test_every_objective_and_every_key_is_on_the_page() -> None:
    for algorithm in REINFORCED:
        assert f"(`{algorithm}`)\n" in PAGE
    for key in READ_BY:
        assert f"`{key}`" in PAGE, key


def test_every_trap_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\|$", PAGE, flags=re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 19))
    named = re.findall(r"`(tests/[a-z_/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 18
    for path, test in named:
        assert re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.MULTILINE), test


def test_nothing_was_left_to_be_filled_in() -> None:
    assert "@" not in PAGE
