"""docs/algorithms.md: every objective has its screen, its defaults are the code's, its tests exist."""

import re
from pathlib import Path
from typing import get_args

import pytest

from schemas.algorithms import DISTILLED, OFFLINE, PAIRS_OF_GROUPS, READ_BY, REINFORCED
from schemas.config import Algorithm

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()


ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
LINES_OF_A_SCREEN = 25


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_objective_has_its_screen(algorithm: str) -> None:
    _, found, rest = PAGE.partition(f"(`{algorithm}`)\n")
    assert found, "no heading ends with its name"
    screen = rest.partition("\n## ")[0]
    assert screen.count("\n") <= LINES_OF_A_SCREEN
    assert re.search(r"^    (loss|A_i|r_t|s_i|delta_t) +=", screen, re.MULTILINE), "no formula"
    for part in ("**When:**", "**Traps:**", "**Agreement:**"):
        assert part in screen, part


def test_the_page_knows_every_objective_that_the_trainer_has() -> None:
    from trainer.algorithms.registry import OBJECTIVES
    from trainer.preferences.registry import PREFERENCE_OBJECTIVES

    assert set(OBJECTIVES) == set(REINFORCED)
    assert {*PREFERENCE_OBJECTIVES, "sft"} == {*OFFLINE, *PAIRS_OF_GROUPS}
    assert {*REINFORCED, *PAIRS_OF_GROUPS, *OFFLINE, *DISTILLED} == set(ALGORITHMS)


def test_every_key_is_on_the_page() -> None:
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
