"""pass@k is the share of all choices of k attempts in which at least one passes."""

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.evaluation_figures import (
    RowOutcome,
    evaluation_figures,
    failed_by_policy,
    pass_at_k,
    reported_k,
)
from infra.readmodel.estimates import is_figure


@pytest.mark.parametrize("n", range(1, 8))
def test_it_equals_the_share_of_all_choices(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            choices = list(combinations(range(n), k))
            good = sum(any(attempt < c for attempt in choice) for choice in choices)
            assert pass_at_k(n, c, k) == Fraction(good, len(choices))


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_impossible_counts_have_no_estimate(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="no estimate"):
        pass_at_k(n, c, k)


def test_k_are_the_powers_of_two_and_n_itself() -> None:
    assert [reported_k(n) for n in (1, 2, 5, 8)] == [(1,), (1, 2), (1, 2, 4, 5), (1, 2, 4, 8)]


def test_only_what_the_policy_wrote_makes_an_attempt_fail() -> None:
    failures = [None, "agent_error", "timeout", "prompt_too_long", "internal_error", "grader_error"]
    assert failed_by_policy(failures) == {1, 2, 3}


def test_a_failed_attempt_counts_as_0_once_whatever_the_run_trains_on() -> None:
    rewards = ((1.0, None), (1.0, 1.0), (1.0, -1.0))
    figures = [
        evaluation_figures({0: RowOutcome(one, frozenset({1}))}, n=2, threshold=0.5)
        for one in rewards
    ]
    assert figures == [figures[0]] * 3
    assert figures[0][0] == pytest.approx(0.5)


def test_failed_attempts_count_as_0_and_others_are_left_out() -> None:
    rows = {
        1: RowOutcome((1.0, 0.0)),
        0: RowOutcome((1.0, None), frozenset({1})),
        2: RowOutcome((0.0, 0.25)),
        3: RowOutcome((1.0, None)),
    }
    mean, figures = evaluation_figures(rows, n=2, threshold=0.5)
    assert mean == pytest.approx((1 + 0 + 1 + 0 + 0 + 0.25 + 1) / 7)
    shown = {name: value for name, value in figures.items() if is_figure(name)}
    assert shown == pytest.approx(
        {
            "eval/count": 8,
            "eval/failed": 1,
            "eval/left_out": 1,
            "eval/rows": 3,
            "eval/reward": mean,
            "eval/pass_rate": 3 / 7,
            "eval/pass@1": (0.5 + 0.5 + 0) / 3,
            "eval/pass@2": (1 + 1 + 0) / 3,
        }
    )
    assert figures["eval/reward/low"] < figures["eval/reward"] < figures["eval/reward/high"]
    assert 0 < figures["eval/pass@2/low"] < 2 / 3 < figures["eval/pass@2/high"] < 1


def test_a_policy_that_crashes_more_never_scores_better() -> None:
    """The same passes, once with answers that are wrong and once with crashes in their places."""
    wrong = {slot: RowOutcome((1.0, 0.0, 0.0, 0.0)) for slot in range(6)}
    crashed = {slot: RowOutcome((1.0, None, None, None), frozenset({1, 2, 3})) for slot in range(6)}
    a, b = (evaluation_figures(rows, n=4, threshold=1.0)[1] for rows in (wrong, crashed))
    assert {**a, "eval/failed": 18.0} == b
    assert b["eval/pass@1"] == 0.25
    assert b["eval/pass@4"] == 1.0


def test_a_failed_attempt_does_not_pass_at_any_threshold() -> None:
    _, figures = evaluation_figures({0: RowOutcome((None,), frozenset({0}))}, n=1, threshold=-1.0)
    assert (figures["eval/reward"], figures["eval/pass_rate"]) == (0.0, 0.0)


def test_without_any_attempt_that_counts_there_are_only_counts() -> None:
    assert evaluation_figures({0: RowOutcome((None,))}, n=1, threshold=1.0) == (
        None,
        {"eval/count": 1, "eval/failed": 0, "eval/left_out": 1},
    )


counts = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8)


@given(counts)
def test_pass_at_k_rises_with_k_because_all_k_have_the_same_rows(
    rows: list[tuple[int, int]],
) -> None:
    outcomes = {
        slot: RowOutcome(
            tuple(1.0 if i < passed else None if i < passed + failed else 0.0 for i in range(6)),
            frozenset(i for i in range(passed, min(6, passed + failed)) if slot % 2),
        )
        for slot, (passed, failed) in enumerate(rows)
    }
    _, figures = evaluation_figures(outcomes, n=6, threshold=1.0)
    found = [figures[f"eval/pass@{k}"] for k in (1, 2, 4, 6) if f"eval/pass@{k}" in figures]
    assert len(found) == (4 if figures.get("eval/rows") else 0)
    assert found == sorted(found)
