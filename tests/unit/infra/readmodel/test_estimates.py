"""Standard errors and intervals follow their definitions, and cover what they promise."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.readmodel.estimates import (
    SMALL_T,
    estimate_difference,
    estimate_mean,
    figures_in_order,
    t_quantile,
)

value = st.floats(-100, 100).map(lambda x: round(x, 3))
rows = st.lists(st.lists(value, max_size=5), min_size=2, max_size=12).filter(
    lambda found: sum(map(bool, found)) > 1
)
square = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(value, min_size=n, max_size=n), min_size=2, max_size=12)
)


@given(rows)
def test_an_interval_holds_its_mean_and_empty_rows_change_nothing(found: list[list[float]]) -> None:
    one = estimate_mean(found)
    assert one is not None
    if one.se == 0 and not all(v in (0.0, 1.0) for row in found for v in row):
        assert (one.low, one.high) == (None, None), "no spread says nothing"
    else:
        assert one.low is not None
        assert one.high is not None
        assert one.low <= one.mean <= one.high
    assert estimate_mean([*found, []]) == one
    assert one.mean == pytest.approx(statistics.fmean(v for row in found for v in row))


@given(square)
def test_with_equal_rows_it_is_the_standard_error_of_the_mean_of_means(
    found: list[list[float]],
) -> None:
    one = estimate_mean(found)
    means = [statistics.fmean(row) for row in found]
    assert one is not None
    oracle = statistics.stdev(means) / math.sqrt(len(means))
    assert one.se == pytest.approx(oracle, rel=1e-6, abs=1e-9)


@given(square, st.floats(-10, 10), st.floats(0.1, 10))
def test_it_moves_and_scales_with_its_values(
    found: list[list[float]], shift: float, scale: float
) -> None:
    one = estimate_mean(found, is_proportion=False)
    other = estimate_mean([[scale * v + shift for v in row] for row in found], is_proportion=False)
    assert one is not None
    assert other is not None
    assert other.mean == pytest.approx(scale * one.mean + shift, rel=1e-6, abs=1e-6)
    assert other.se == pytest.approx(scale * (one.se or 0.0), rel=1e-6, abs=1e-6)


@given(st.lists(st.booleans(), min_size=2, max_size=60))
def test_single_attempts_have_the_interval_of_wilson(passes: list[bool]) -> None:
    """The definition: the proportions p whose test |mean - p| <= z sqrt(p (1 - p) / n) is passed. The
    variance of the sample has n - 1, which is one attempt less of effective number."""
    one = estimate_mean([[float(passed)] for passed in passes])
    assert one is not None
    mean = sum(passes) / len(passes)
    n = len(passes) - 1 if 0 < mean < 1 else len(passes)
    for end in (one.low, one.high):
        assert end is not None
        assert 0 <= end <= 1
        if 0 < end < 1:
            assert abs(mean - end) == pytest.approx(
                1.959963984540054 * math.sqrt(end * (1 - end) / n), abs=1e-9
            )


@pytest.mark.parametrize("row", [[1, 0, 0], [1, 1, 0], [1] * 9 + [0], [1] * 3 + [0] * 4])
@pytest.mark.parametrize("num_rows", [2, 3, 6, 7, 40])
def test_rows_of_equal_shares_have_the_interval_of_as_many_attempts(
    row: list[float], num_rows: int
) -> None:
    """Rounding gives such rows a standard error of 1e-17. That must not count as certainty."""
    one = estimate_mean([row] * num_rows)
    assert one is not None
    assert one.low is not None
    assert one.high is not None
    assert one.se == 0.0
    for end in (one.low, one.high):
        assert abs(one.mean - end) == pytest.approx(
            1.959963984540054 * math.sqrt(end * (1 - end) / num_rows), abs=1e-9
        )


@pytest.mark.parametrize("reward", [0.5, 0.1, -3.7, 123456.789])
def test_equal_rewards_have_no_interval(reward: float) -> None:
    one = estimate_mean([[reward] * 3] * 4)
    assert one is not None
    assert one.mean == pytest.approx(reward)
    assert (one.se, one.low, one.high) == (0.0, None, None)


@given(square, st.floats(-5, 5))
def test_a_difference_is_paired(found: list[list[float]], shift: float) -> None:
    """Given two evaluations that differ by the same at each row, however much the rows differ, the
    difference has no error."""
    one = estimate_difference(found, [[v + shift for v in row] for row in found])
    assert one is not None
    assert one.mean == pytest.approx(shift, abs=1e-9)
    assert (one.se, one.low, one.high) == (None, None, None), "no spread says nothing"


def test_two_rows_that_gain_alike_do_not_prove_that_all_rows_gain() -> None:
    one = estimate_difference([[0.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]])
    assert one is not None
    assert (one.mean, one.num_rows, one.low, one.high) == (1.0, 2, None, None)
    almost = estimate_difference([[0.0], [0.0]], [[1.0], [0.999]])
    assert almost is not None
    assert almost.low is not None


def test_the_difference_of_two_evaluations_equals_one_computed_by_hand() -> None:
    one = estimate_difference([[0, 1], [1], [], [0]], [[1, 1], [1], [1], [1]])
    assert one is not None
    differences = [0.5, 0.0, 1.0]
    assert one.num_rows == 3
    assert one.mean == pytest.approx(0.5)
    assert one.se == pytest.approx(statistics.stdev(differences) / math.sqrt(3))
    assert one.high == pytest.approx(0.5 + SMALL_T[1] * (one.se or 0.0))


def test_one_row_has_no_interval_and_none_has_no_mean() -> None:
    one = estimate_mean([[1.0, 0.0]])
    assert one is not None
    assert (one.mean, one.se, one.low) == (0.5, None, None)
    assert one.figures("x") == {"x": 0.5}
    assert estimate_mean([[], []]) is None
    assert estimate_difference([[1.0]], [[]]) is None


def test_equal_passes_have_an_interval_with_a_width() -> None:
    one = estimate_mean([[1.0]] * 20)
    assert one is not None
    assert (one.mean, one.high) == (1.0, 1.0)
    assert one.low == pytest.approx(0.8389, abs=1e-4)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (4, 2.77645), (5, 2.57058), (6, 2.44691), (10, 2.22814), (30, 2.04227)],
)
def test_the_quantiles_of_student_s_t_equal_the_tabulated_ones(
    degrees: int, quantile: float
) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, abs=2e-4)


def test_the_standard_error_is_that_of_a_bootstrap_over_rows() -> None:
    """Rows differ in their difficulty and in their number of attempts."""
    draw = random.Random(7)
    found = []
    for _ in range(60):
        p = draw.random()
        found.append([float(draw.random() < p) for _ in range(draw.randint(1, 6))])
    means = []
    for _ in range(3000):
        again = [value for _ in found for value in draw.choice(found)]
        means.append(statistics.fmean(again))
    one = estimate_mean(found)
    assert one is not None
    assert one.se == pytest.approx(statistics.stdev(means), rel=0.08)
    ends = statistics.quantiles(means, n=40)
    assert one.low == pytest.approx(ends[0], abs=0.02)
    assert one.high == pytest.approx(ends[-1], abs=0.02)


@pytest.mark.parametrize(("num_rows", "p", "attempts"), [(12, 0.9, 1), (40, 0.5, 4), (60, 0.3, 3)])
def test_intervals_cover_what_they_promise(num_rows: int, p: float, attempts: int) -> None:
    """Rows with a difficulty of their own, whose mean is `p`: 95 % of the intervals hold it. Twin: an
    interval that takes the attempts for independent covers less."""
    draw, hits, naive, tries = random.Random(3), 0, 0, 1500
    for _ in range(tries):
        found = []
        for _ in range(num_rows):
            own = p if attempts == 1 else draw.betavariate(p, 1 - p)
            found.append([float(draw.random() < own) for _ in range(attempts)])
        one, flat = estimate_mean(found), estimate_mean([[v] for row in found for v in row])
        assert one is not None
        assert flat is not None
        hits += (one.low or 0.0) <= p <= (one.high or 0.0)
        naive += (flat.low or 0.0) <= p <= (flat.high or 0.0)
    assert 0.92 <= hits / tries <= 0.99
    if attempts > 1:
        assert naive / tries < 0.9


def test_figures_are_shown_with_their_intervals() -> None:
    one = estimate_mean([[1.0], [2.0], [4.0]])
    assert one is not None
    [reward, tokens] = figures_in_order({"eval/tokens": 3.0, **one.figures("eval/reward")})
    assert (reward.key, reward.value, reward.se) == ("eval/reward", one.mean, one.se)
    assert reward.interval == (one.low, one.high)
    assert (tokens.key, tokens.interval) == ("eval/tokens", None)
