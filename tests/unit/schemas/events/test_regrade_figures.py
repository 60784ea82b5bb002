"""The figures of a regrade: hand-computed examples, and laws that hold for all rewards."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.events.regrades.figures import (
    Disagreement,
    RegradeSums,
    add_by_step,
    kendall_tau,
    report_of,
    sides_of,
    sums_of,
    worst_of,
)

REWARD = st.none() | st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0]) | st.floats(-100, 100)
PAIRS = st.lists(st.tuples(REWARD, REWARD), max_size=8)


def sums(before: Sequence[float | None], after: Sequence[float | None]) -> RegradeSums:
    return sums_of(before, after, threshold=1.0)


def test_a_group_of_four_has_the_figures_that_a_hand_computes() -> None:
    """Means: 0.5 before, 0.4 after. Above the mean: samples 0 and 1 before, 0 and 2 after."""
    report = report_of(sums((1.0, 1.0, 0.0, 0.0), (1.0, 0.0, 0.6, 0.0)))
    assert (report.groups, report.samples, report.lost, report.found) == (1, 4, 0, 0)
    assert report.reward_before == 0.5
    assert report.reward_after == pytest.approx(0.4)
    assert report.changed_share == 0.5
    assert report.mean_flip_share == 0.5
    assert report.threshold_flip_share == 0.25
    assert report.advantage_sign_share == 0.5
    # Of 6 pairs, 2 are tied before and 1 after. 0-2, 0-3 agree; 1-2 disagrees; 1-3 is tied after.
    assert report.kendall_tau == pytest.approx((2 - 1) / (4 * 5) ** 0.5)


def test_missing_rewards_are_counted_and_never_a_zero() -> None:
    report = report_of(sums((1.0, None, 0.0), (None, 0.5, 0.0)))
    assert (report.graded_before, report.graded_after, report.lost, report.found) == (2, 2, 1, 1)
    assert (report.reward_before, report.reward_after) == (0.5, 0.25)
    assert report.changed_share == 0.0
    assert report.kendall_tau is None
    nothing = report_of(sums((1.0, 0.0), (None, None)))
    assert (nothing.reward_after, nothing.changed_share, nothing.lost) == (None, None, 2)


def test_groups_that_lose_or_gain_a_difference_are_told_apart() -> None:
    assert sums((1.0, 0.0), (0.5, 0.5)).flattened == 1
    assert sums((0.5, 0.5), (1.0, 0.0)).spread == 1
    assert sums((0.5, 0.5), (0.0, 0.0)).flat == 1
    lost = sums((1.0, 0.0), (None, None))
    assert (lost.flattened, lost.spread, lost.flat) == (0, 0, 0)


def test_an_advantage_that_becomes_zero_has_another_sign() -> None:
    turned = sums((1.0, 0.0), (0.5, 0.5))
    assert (turned.advantages, turned.turned, turned.crossed) == (2, 2, 0)
    of_batch = sums_of((1.0, 0.0), (0.0, 1.0), threshold=1.0, compares_groups=False)
    assert (of_batch.advantages, of_batch.crossed) == (0, 2)
    assert report_of(of_batch).advantage_sign_share is None


@pytest.mark.parametrize(
    ("first", "second", "tau"),
    [
        ((1, 2, 3), (1, 2, 3), 1.0),
        ((1, 2, 3), (3, 2, 1), -1.0),
        ((1, 2, 3), (1, 3, 2), 1 / 3),
        ((1, 2, 3, 4), (1, 1, 2, 2), 4 / (4 * 6) ** 0.5),
        ((1, 1, 1), (1, 2, 3), None),
        ((1,), (2,), None),
        ((), (), None),
    ],
)
def test_kendalls_tau_is_that_of_the_formula(
    first: Sequence[float], second: Sequence[float], tau: float | None
) -> None:
    assert kendall_tau(first, second) == (None if tau is None else pytest.approx(tau))


@given(PAIRS)
def test_equal_rewards_change_nothing(pairs: list[tuple[float | None, float | None]]) -> None:
    rewards = [before for before, _ in pairs]
    same = sums(rewards, rewards)
    changes = (same.changed, same.crossed, same.flipped, same.turned, same.lost, same.found)
    assert changes == (0, 0, 0, 0, 0, 0)
    assert same.flattened == same.spread == 0
    assert not same.ranked or same.tau == pytest.approx(1.0)


@given(PAIRS)
def test_figures_read_backwards_swap_before_and_after(
    pairs: list[tuple[float | None, float | None]],
) -> None:
    before, after = [b for b, _ in pairs], [a for _, a in pairs]
    there, back = sums(before, after), sums(after, before)
    assert (there.lost, there.flattened) == (back.found, back.spread)
    assert (there.total_before, there.before) == (back.total_after, back.after)
    assert there.crossed == back.crossed
    assert there.turned == back.turned
    assert there.tau == pytest.approx(back.tau)


@given(PAIRS)
def test_shares_lie_between_0_and_1(pairs: list[tuple[float | None, float | None]]) -> None:
    report = report_of(sums([b for b, _ in pairs], [a for _, a in pairs]))
    shares = (
        report.changed_share,
        report.mean_flip_share,
        report.threshold_flip_share,
        report.advantage_sign_share,
    )
    assert all(share is None or 0 <= share <= 1 for share in shares)
    assert report.kendall_tau is None or -1.0000001 <= report.kendall_tau <= 1.0000001


@given(st.lists(PAIRS, max_size=4))
def test_sums_add_up_in_any_order_of_groups(
    groups: list[list[tuple[float | None, float | None]]],
) -> None:
    parts = [{n % 2: sums([b for b, _ in g], [a for _, a in g])} for n, g in enumerate(groups)]
    one: dict[int, RegradeSums] = {}
    other: dict[int, RegradeSums] = {}
    for part in parts:
        one = add_by_step(one, part)
    for part in reversed(parts):
        other = add_by_step(other, part)
    assert one.keys() == other.keys()
    for step, total in one.items():
        found = report_of(total).model_dump()
        assert found == pytest.approx(report_of(other[step]).model_dump())


def test_sides_of_a_group_without_differences_are_zero() -> None:
    assert sides_of((0.1, 0.1, None)) == [0, 0, None]
    assert sides_of((1.0, 0.0, 0.5)) == [1, -1, 0]


def test_the_largest_disagreements_come_first_and_equal_ones_by_name() -> None:
    found = [
        Disagreement(sample=name, step=1, before=before, after=after)
        for name, before, after in (("b", 0, 1), ("a", 1, 0), ("c", 0, 2), ("d", 1, 1))
    ]
    assert [one.sample for one in worst_of(found, most=2)] == ["c", "a"]
    assert [one.sample for one in worst_of(found, most=9)] == ["c", "a", "b"]
