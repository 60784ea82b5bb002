"""Curves with few points keep what matters of curves with many."""

import math

from hypothesis import given
from hypothesis import strategies as st

from producers.dashboard.charts import Curve, curve, curves, thin, whiskers

VALUES = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=400)


@given(values=VALUES, most=st.integers(min_value=8, max_value=100))
def test_a_thin_curve_keeps_its_ends_and_its_extremes(values: list[float], most: int) -> None:
    points = list(enumerate(values))
    found = thin(points, most)
    assert len(found) <= max(most, 4)
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    if points:
        assert (found[0], found[-1]) == (points[0], points[-1])
        assert min(v for _, v in found) == min(values)
        assert max(v for _, v in found) == max(values)


def test_a_curve_fits_its_box() -> None:
    drawn = curve([(0, 1.0), (5, 3.0), (10, 2.0)], width=100, height=10)
    assert drawn is not None
    assert drawn.points == "0.0,10.0 50.0,0.0 100.0,5.0"
    assert (drawn.least, drawn.largest) == (1.0, 3.0)


def test_a_curve_of_the_largest_floats_has_points() -> None:
    drawn = curve([(0, -1.7e308), (1, 1.7e308)], width=10, height=10)
    assert drawn is not None
    assert drawn.points == "0.0,10.0 10.0,0.0"


def test_values_that_are_no_numbers_are_left_out() -> None:
    assert curve([(0, math.nan), (1, math.inf)], width=10, height=10) is None
    drawn = curve([(0, 1.0), (1, math.nan), (2, 1.0)], width=10, height=10)
    assert drawn is not None
    assert drawn.points == "0.0,5.0 10.0,5.0"  # a line that does not move is in the middle


def test_noise_is_drawn_as_a_straight_line() -> None:
    drawn = curve([(1, 1e-9), (2, -3e-9), (3, 2e-9)], width=20, height=10)
    assert drawn is not None
    assert (drawn.least, drawn.largest) == (0.0, 0.0)
    assert drawn.points == "0.0,5.0 10.0,5.0 20.0,5.0"


def test_whiskers_join_two_curves_at_each_step() -> None:
    low, high = Curve("0.0,9.0 5.0,8.0", 1, 9), Curve("0.0,1.0 5.0,2.0", 1, 9)
    assert whiskers(low, high) == "M0.0,9.0L0.0,1.0M5.0,8.0L5.0,2.0"
    assert whiskers(low, None) == whiskers(None, high) == ""


def test_curves_in_common_axes_have_common_ends() -> None:
    one, other, nothing = curves(
        [[(1, 0.0), (3, 1.0)], [(2, 2.0), (5, 0.5)], [(4, 9.0)]], width=40, height=10
    )
    assert nothing is None
    assert one is not None
    assert other is not None
    assert one.points == "0.0,10.0 20.0,5.0"
    assert other.points == "10.0,0.0 40.0,7.5"
    assert (one.least, one.largest) == (other.least, other.largest) == (0.0, 2.0)
