"""The figures of an evaluation from the results of its rows, and which files a client selects."""

import pytest

from infra.readmodel.evaluation_results import results_by_row
from infra.readmodel.registry import EvaluationGroup
from producers.core.evaluations.files import KINDS, Selection
from producers.core.evaluations.summary import (
    EvaluationSummary,
    RewardSpread,
    pass_at_k_of,
    summarize,
)
from schemas.errors import InvalidConfig
from schemas.sampling import Grade, SampleFailure

TIMEOUT = SampleFailure.model_validate({"category": "timeout", "message": "too slow"})
LOST = SampleFailure.model_validate({"category": "internal_error", "message": "it is gone"})


def summary_of(
    *rows: tuple[float | SampleFailure, ...], total: int = 2, n: int = 2
) -> EvaluationSummary:
    """The figures of rows with these rewards or failures."""
    groups = []
    for slot, row in enumerate(rows):
        grades = [
            Grade(index=i, reward=None, failure=one)
            if isinstance(one, SampleFailure)
            else Grade(index=i, reward=one)
            for i, one in enumerate(row)
        ]
        text = "[" + ",".join(grade.model_dump_json() for grade in grades) + "]"
        groups.append(EvaluationGroup(f"e-evaluate-0-{slot}-0", 0, slot, slot, "", text, None))
    results = results_by_row(groups, threshold=1.0)
    metrics = {"eval/pass@1": 0.5, "eval/pass@1/se": 0.1, "eval/pass@16": 1.0, "eval/reward": 2}
    return summarize(results, rows=total, n=n, threshold=1.0, metrics=metrics)


def test_attempts_are_counted_by_their_outcome() -> None:
    found = summary_of((1.0, 0.5), (TIMEOUT, LOST), total=3)
    assert (found.attempts, found.graded, found.passed) == (6, 2, 1)
    assert (found.failed, found.skipped) == (2, 2)
    assert found.graded + found.failed + found.skipped == found.attempts
    assert found.pass_rate == pytest.approx(1 / 3), "the lost attempt does not count"
    assert found.reward == pytest.approx(0.5), "what the policy failed counts as 0"
    assert found.rewards == RewardSpread(mean=0.75, std=0.25, min=0.5, median=0.75, max=1.0)


def test_an_evaluation_without_a_reward_has_no_spread() -> None:
    found = summary_of((LOST, LOST))
    assert found.rewards is None
    assert found.pass_rate is None
    assert (found.graded, found.failed, found.skipped) == (0, 2, 2)


def test_pass_at_k_has_no_standard_errors() -> None:
    assert summary_of((1.0, 1.0)).pass_at_k == {1: 0.5, 16: 1.0}
    assert pass_at_k_of({"eval/pass@2/low": 0.1, "eval/pass_rate": 1.0}) == {}


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [(None, [0, 1, 2, 3, 4, 5]), ("0", [0]), ("0,3-4", [0, 3, 4]), ("4-3", []), ("9", [])],
)
def test_rows_are_numbers_and_ranges(rows: str | None, chosen: list[int]) -> None:
    selection = Selection.parse(None, rows)
    assert [row for row in range(6) if selection.has(row)] == chosen
    assert selection.kinds == set(KINDS)


@pytest.mark.parametrize(
    ("kinds", "rows"),
    [
        ("metrics,x", None),
        (None, "a"),
        (None, "1,,2"),
        (None, "1-"),
        (None, "-1"),
        (None, "1" * 99),
    ],
)
def test_a_selection_that_is_not_one_is_refused(kinds: str | None, rows: str | None) -> None:
    with pytest.raises(InvalidConfig):
        Selection.parse(kinds, rows)


@pytest.mark.parametrize("kinds", ["all", "", "metrics,all"])
def test_all_kinds_are_selected_without_one(kinds: str) -> None:
    assert Selection.parse(kinds, None).kinds == set(KINDS)
    assert Selection.parse("metrics,logs", None).kinds == {"metrics", "logs"}
