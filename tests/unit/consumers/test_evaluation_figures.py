"""pass@k is the share of all choices of k attempts in which at least one passes."""

from fractions import Fraction
from itertools import combinations

import pytest

from consumers.evaluation_figures import evaluation_figures, pass_at_k, powers_of_two


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


def test_powers_of_two_up_to_n() -> None:
    assert [powers_of_two(n) for n in (1, 2, 5, 8)] == [(1,), (1, 2), (1, 2, 4), (1, 2, 4, 8)]


def test_the_figures_are_means_over_rows_and_leave_out_what_has_no_reward() -> None:
    rewards = {1: (1.0, 0.0), 0: (1.0, None), 2: (0.0, 0.25), 3: (None, None)}
    mean, figures = evaluation_figures(rewards, n=2, threshold=0.5)
    assert mean == pytest.approx((1 + 0 + 1 + 0 + 0.25) / 5)
    assert figures == pytest.approx(
        {
            "eval/count": 8,
            "eval/failed": 3,
            "eval/reward": mean,
            "eval/pass_rate": 2 / 5,
            "eval/pass@1": (0.5 + 1 + 0) / 3,
            "eval/pass@2": (1 + 0) / 2,
        }
    )


def test_without_any_reward_there_are_only_counts() -> None:
    assert evaluation_figures({0: (None,)}, n=1, threshold=1.0) == (
        None,
        {"eval/count": 1, "eval/failed": 1},
    )
