"""`headrace eval info`: the figures of an evaluation, and what to know of them."""

import pytest

from tests.unit.producers.cli.conftest import FakeServer, Run

SUMMARY = {"attempts": 4, "graded": 3, "tokens": 120, "rewards": {"mean": 0.5, "max": 1.0}}
NOTE = "Attempts that failed count as 0, which is more than this mean reward"


@pytest.mark.parametrize(
    ("reward", "failed", "is_told"), [(-0.5, 3.0, True), (-0.5, 0.0, False), (0.5, 3.0, False)]
)
def test_it_says_when_a_policy_that_crashes_scores_better(
    server: FakeServer, headrace: Run, reward: float, failed: float, *, is_told: bool
) -> None:
    metrics = {"eval/reward": reward, "eval/failed": failed, "eval/left_out": 0.0}
    server.answer("GET", "/evals/e", {"eval": {"name": "e", "metrics": metrics}})
    server.answer("GET", "/evals/e/summary", {"summary": SUMMARY})
    shown = headrace("eval", "info", "e").out.replace("\n", " ")
    assert (NOTE in shown) is is_told


def test_figures_are_shown_with_their_intervals(server: FakeServer, headrace: Run) -> None:
    metrics = {"eval/reward": 0.5, "eval/reward/se": 0.125, "eval/rows": 4.0}
    ends = {"eval/reward/low": 0.25, "eval/reward/high": 0.75}
    found = {"name": "e", "reward": 0.5, "metrics": metrics | ends}
    server.answer("GET", "/evals/e", {"eval": found})
    server.answer("GET", "/evals/e/summary", {"summary": SUMMARY})
    shown = cells(headrace("eval", "info", "e").out)
    assert ["key", "value", "standard error", "95 % interval"] in shown
    assert ["eval/reward", "0.5", "0.125", "0.25 to 0.75"] in shown
    assert ["eval/rows", "4", "-", "-"] in shown
    assert ["tokens", "120"] in shown
    assert ["reward max", "1"] in shown
    old = {"name": "old", "reward": 0.5, "metrics": metrics}
    server.answer("GET", "/evals", {"evals": [found, old]})
    names, *rows = cells(headrace("eval", "list").out)
    assert [row[names.index("95 % interval")] for row in rows] == ["0.25 to 0.75", "-"]


def cells(shown: str) -> list[list[str]]:
    """The rows of the tables that a command printed."""
    lines = [line.replace("┃", "│") for line in shown.splitlines()]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
