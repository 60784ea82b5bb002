"""The schedule: each row once an epoch, the lag within its bound, and never more open steps than
allowed."""

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.kit.specs import config
from trainer.schedule import (
    Pace,
    may_be_pinned,
    next_position,
    pace_of,
    replacement,
    row_at,
    shuffled_index,
    shuffled_place,
    step_rows,
    steps_due,
)

PACES = st.builds(Pace, depth=st.integers(0, 6), interval=st.integers(1, 5))


@given(PACES, st.integers(1, 500))
def test_a_trained_token_is_never_older_than_depth_plus_interval_less_one(
    pace: Pace, step: int
) -> None:
    lag = (step - 1) - pace.pinned_version(step)
    assert 0 <= lag <= pace.most_lag == pace.depth + pace.interval - 1
    assert pace.pinned_version(step) % pace.interval == 0
    assert pace.pinned_version(step) <= pace.pinned_version(step + 1)


@given(PACES)
def test_the_bound_is_reached(pace: Pace) -> None:
    assert max(step - 1 - pace.pinned_version(step) for step in range(1, 60)) == pace.most_lag


def test_modes_are_depths() -> None:
    def of(**advanced: Any) -> Pace:
        return pace_of(config(advanced=advanced))

    assert of() == Pace(0)
    assert of(execution_mode="one_step_off_async") == Pace(1)
    assert of(execution_mode="fully_async") == Pace(4)
    said = of(execution_mode="fully_async", max_steps_off_policy=7, weight_sync_interval=3)
    assert said == Pace(7, 3)


@given(PACES, st.integers(1, 60))
def test_every_step_is_asked_for_once_in_order_and_few_are_open(pace: Pace, total: int) -> None:
    settled, requested, asked = 0, 0, []
    kept = {0}
    while settled < total:
        for step in steps_due(pace, settled=settled, requested=requested, total=total):
            assert pace.pinned_version(step) <= settled, "its version exists"
            assert pace.pinned_version(step) in kept, "and was not forgotten"
            asked.append(step)
            requested = step
        assert requested > settled, "there is always something to do"
        assert requested - settled <= pace.depth + 1
        settled += 1
        kept = {v for v in kept | {settled} if may_be_pinned(pace, v, requested=requested)}
        assert len(kept) <= pace.depth // pace.interval + 2
    assert asked == list(range(1, total + 1))


@given(st.integers(1, 300), st.text(max_size=4))
def test_the_shuffle_is_a_permutation(size: int, key: str) -> None:
    assert sorted(shuffled_index(n, size, key=key) for n in range(size)) == list(range(size))


@given(st.integers(0, 10), st.integers(1, 50), st.integers(1, 60))
def test_an_epoch_visits_every_row_once(seed: int, batch: int, num_rows: int) -> None:
    steps = -(-num_rows // batch)
    rows = [
        row
        for step in range(1, steps + 1)
        for row in step_rows(seed, step=step, batch=batch, num_rows=num_rows)
    ]
    assert sorted(rows[:num_rows]) == list(range(num_rows))


def test_other_seeds_and_epochs_have_other_orders() -> None:
    first, other = (step_rows(seed, step=1, batch=50, num_rows=50) for seed in (1, 2))
    second = step_rows(1, step=2, batch=50, num_rows=50)
    assert len({tuple(order) for order in (first, other, second)}) == 3


@given(st.integers(0, 10), st.integers(1, 5), st.integers(1, 12), st.integers(1, 60))
def test_replacements_never_repeat_a_row_of_their_step(
    seed: int, step: int, batch: int, num_rows: int
) -> None:
    """As long as there are rows that the step does not have. Each of those comes before any again."""
    begun = tuple(step_rows(seed, step=step, batch=batch, num_rows=num_rows))
    place: dict[str, Any] = {"step": step, "rows": begun, "num_rows": num_rows}
    own = set(begun)
    assume(len(own) < num_rows)
    rows = [
        replacement(seed, slot=slot, number=number, **place).row
        for number in (1, 2, 3)
        for slot in range(batch)
    ]
    rest = num_rows - len(own)
    assert len(set(rows[:rest])) == min(len(rows), rest)
    assert not own & set(rows)


@given(st.integers(0, 10), st.integers(1, 5), st.integers(1, 12), st.integers(1, 40))
def test_a_slot_gets_every_other_row_before_one_comes_again(
    seed: int, step: int, batch: int, num_rows: int
) -> None:
    """With 8 rows and steps of 4, a slot that was dropped four times had one row four times."""
    own = tuple(step_rows(seed, step=step, batch=batch, num_rows=num_rows))
    place: dict[str, Any] = {"step": step, "rows": own, "num_rows": num_rows}
    num_free = num_rows - len(set(own)) or num_rows - 1
    for slot in range(batch):
        rows = [
            replacement(seed, slot=slot, number=number, **place).row
            for number in range(1, num_free + 1)
        ]
        assert len(set(rows)) == num_free
        assert own[slot] not in rows


@given(st.integers(0, 10), st.integers(1, 3), st.integers(1, 10), st.integers(20, 60))
def test_replacements_of_a_step_are_of_different_rows(
    seed: int, number: int, batch: int, num_rows: int
) -> None:
    begun = tuple(step_rows(seed, step=1, batch=batch, num_rows=num_rows))
    place: dict[str, Any] = {"number": number, "rows": begun, "num_rows": num_rows}
    found = [replacement(seed, step=1, slot=slot, **place) for slot in range(batch)]
    assert len({slot.row for slot in found}) == batch
    assert {slot.replacement for slot in found} == {number}
    assert found == [replacement(seed, step=1, slot=slot, **place) for slot in range(batch)]
    assert all(0 <= slot.row < num_rows for slot in found)


@given(size=st.integers(1, 300), key=st.text(max_size=5))
def test_a_place_is_the_index_that_the_shuffle_gave_its_row(size: int, key: str) -> None:
    found = [shuffled_place(shuffled_index(n, size, key=key), size, key=key) for n in range(size)]
    assert found == list(range(size))


@given(seed=st.integers(0, 9), num_rows=st.integers(1, 40), position=st.integers(0, 200))
def test_the_next_position_of_a_row_is_the_first_one_that_has_it(
    seed: int, num_rows: int, position: int
) -> None:
    for row in range(num_rows):
        found = next_position(row, seed=seed, num_rows=num_rows, position=position)
        passed = range(position, found)
        assert row_at(found, seed=seed, num_rows=num_rows) == row
        assert all(row_at(n, seed=seed, num_rows=num_rows) != row for n in passed)
