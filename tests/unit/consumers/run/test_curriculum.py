"""A run with a curriculum: rows go to pools by their pass rates, and the choice of rows never depends on
which group is graded first."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.run.curriculum import RowPools, choose_rows, decide_moves, measure
from schemas.datasets import Curriculum, Pool
from schemas.events import (
    BatchAssembled,
    Event,
    GroupsRequested,
    GroupsSettled,
    PoolsDecided,
    RunPauseRequested,
    RunResumeRequested,
    RunWarned,
    SettledGroup,
)
from schemas.specs import BatchGroup, GroupSpec, SampleEntry
from tests.kit.property_examples import examples
from tests.kit.specs import ref
from tests.unit.consumers.runs import Story, graded, only, requested, updated
from trainer import schedule

BOTH: dict[str, Any] = {"min_pass_rate": 0.1, "max_pass_rate": 0.9}


def begun(
    steps: int = 6, *, curriculum: Mapping[str, Any] = BOTH, **advanced: Any
) -> tuple[Story, list[Event]]:
    story = Story(requested(steps=steps, advanced={"curriculum": dict(curriculum), **advanced}))
    return story, story.begin().events


def of(events: Sequence[Event], kind: type[Any]) -> Any:
    (found,) = (event for event in events if isinstance(event, kind))
    return found


def step(
    story: Story, request: GroupsRequested, rewards: Mapping[int, Sequence[Any]]
) -> list[Event]:
    """The events after a step in which the groups of these rows got these rewards."""
    for spec in request.group_specs():
        story.tell(graded(spec, *rewards.get(spec.row, (0.0, 1.0))))
    return story.tell(updated(request.step)).events


def test_a_run_without_a_curriculum_decides_no_pools() -> None:
    story = Story(requested(steps=3))
    first = of(story.begin().events, GroupsRequested)
    step(story, first, {})
    assert not [event for event in story.told if isinstance(event, PoolsDecided)]
    batch = of(story.told, BatchAssembled)
    assert not [key for key in batch.metrics if key.startswith("pool/")]


def test_solved_and_unsolved_rows_go_to_pools_and_are_not_requested_again() -> None:
    story, events = begun(steps=9)
    assert of(events, PoolsDecided).num_normal == 8
    first = of(events, GroupsRequested)
    one, two = (slot.row for slot in first.slots)
    events = step(story, first, {one: (1.0, 1.0), two: (0.0, 0.0)})
    decided = of(events, PoolsDecided)
    assert (decided.step, decided.measured_up_to) == (2, 1)
    assert (decided.easy, decided.hard, decided.left) == ((one,), (two,), ())
    assert (decided.num_easy, decided.num_hard, decided.num_normal) == (1, 1, 6)
    later = []
    for _ in range(6):
        request = of(events, GroupsRequested)
        later += [slot.row for slot in request.slots]
        events = step(story, request, {})
    assert not {one, two} & set(later)
    assert sorted(later) == sorted(2 * [row for row in range(8) if row not in (one, two)]), (
        "each of the others twice"
    )


def test_the_batch_says_how_many_rows_are_in_each_pool() -> None:
    story, events = begun()
    first = of(events, GroupsRequested)
    one, two = (slot.row for slot in first.slots)
    second = of(step(story, first, {one: (1.0, 1.0), two: (0.0, 0.0)}), GroupsRequested)
    step(story, second, {})
    batch = [event for event in story.told if isinstance(event, BatchAssembled)][1]
    sizes = {key: value for key, value in batch.metrics.items() if key.startswith("pool/")}
    assert sizes == {"pool/easy": 1, "pool/hard": 1, "pool/normal": 6}


def test_a_row_of_the_hard_pool_comes_back_by_its_share_and_leaves_it() -> None:
    story, events = begun(curriculum={"min_pass_rate": 0.1, "hard_fraction": 0.5})
    first = of(events, GroupsRequested)
    one = first.slots[0].row
    events = step(story, first, {one: (0.0, 0.0)})
    second = of(events, GroupsRequested)
    assert one in [slot.row for slot in second.slots], "half of two groups"
    decided = of(step(story, second, {one: (0.0, 1.0)}), PoolsDecided)
    assert (decided.left, decided.num_hard) == ((one,), 0)


def test_one_step_off_decides_without_the_step_that_is_still_open() -> None:
    """Step 2 is graded before step 1 is trained. Its groups count for step 4, not for step 3."""
    story, events = begun(execution_mode="one_step_off_async")
    first, second = (event for event in events if isinstance(event, GroupsRequested))
    solved = {slot.row: (1.0, 1.0) for slot in second.slots}
    for spec in second.group_specs():
        story.tell(graded(spec, 1.0, 1.0))
    decided = of(step(story, first, {}), PoolsDecided)
    assert (decided.step, decided.measured_up_to, decided.easy) == (3, 1, ())
    decided = of(story.tell(updated(2)).events, PoolsDecided)
    assert (decided.step, decided.easy) == (4, tuple(sorted(solved)))


def test_a_replacement_is_in_no_pool() -> None:
    story, events = begun(algorithm="dapo", max_replacements=6)
    first = of(events, GroupsRequested)
    one, two = (slot.row for slot in first.slots)
    for spec in first.group_specs():
        events = story.tell(graded(spec, 1.0, 1.0)).events
    replaced = {one, two}
    for _ in range(3):  # the two other groups of this step train
        asked = [event for event in story.told if isinstance(event, GroupsRequested)][-2:]
        for request in asked:
            (spec,) = request.group_specs()
            replaced.add(spec.row)
            events = story.tell(graded(spec)).events
        if any(isinstance(event, BatchAssembled) for event in events):
            break
    second = of(story.tell(updated(1)).events, GroupsRequested)
    rows = set()
    spec = second.group_specs()[0]
    for _ in range(4):
        asked = of(story.tell(graded(spec, 0.0, 0.0)).events[-1:], GroupsRequested)
        (spec,) = asked.group_specs()
        rows.add(spec.row)
    assert not {one, two} & rows, "both are solved"


@pytest.mark.parametrize(
    ("reward", "category", "says"),
    [
        (1.0, "none", "all 8 rows are in the pools (8 above max_pass_rate 0.9)"),
        (0.0, "none", "set advanced.curriculum.pass_reward to a reward that samples get"),
    ],
)
def test_a_run_whose_rows_are_all_solved_or_none_goes_on_and_says_so_once(
    reward: float, category: str, says: str
) -> None:
    story, events = begun(steps=8)
    seen: set[int] = set()
    for _ in range(7):
        request = of(events, GroupsRequested)
        rows = [slot.row for slot in request.slots]
        assert len(set(rows)) == 2
        seen |= set(rows)
        events = step(story, request, dict.fromkeys(rows, (reward, reward)))
    warnings = [e for e in story.told if isinstance(e, RunWarned) and e.about == "pools"]
    assert [(warning.step, warning.category) for warning in warnings] == [(5, category)]
    assert says in warnings[0].message
    assert seen == set(range(8))


def test_a_run_with_too_few_rows_in_no_pool_fills_its_step_and_says_so() -> None:
    story, events = begun(steps=8)
    kept = 3
    for _ in range(5):
        request = of(events, GroupsRequested)
        rows = [slot.row for slot in request.slots]
        assert len(set(rows)) == 2
        events = step(story, request, {row: (1.0, 1.0) for row in rows if row != kept})
    (warning,) = (e for e in story.told if isinstance(e, RunWarned) and e.about == "pools")
    assert warning.category == "few"
    assert "only 1 of the 8 rows are in no pool" in warning.message
    assert kept in [slot.row for slot in of(events, GroupsRequested).slots]


def test_a_pool_without_rows_leaves_its_share_to_the_rows_in_no_pool() -> None:
    """Half of two groups is for hard rows, of which there are none, so two other rows are wanted."""
    table = {**BOTH, "hard_fraction": 0.5}
    story, events = begun(steps=8, curriculum=table)
    for _ in range(6):
        request = of(events, GroupsRequested)
        solved = {slot.row: (1.0, 1.0) for slot in request.slots if slot.row != 3}
        events = step(story, request, solved)
    (warning,) = (e for e in story.told if isinstance(e, RunWarned) and e.about == "pools")
    assert "only 1 of the 8 rows are in no pool, and step 5 wants 2" in warning.message


SIZES = st.integers(1, 12)


@given(SIZES, st.integers(1, 40), st.integers(0, 99), st.data())
def test_rows_of_a_step_are_different_as_long_as_there_are_enough(
    num_groups: int, num_rows: int, seed: int, data: st.DataObject
) -> None:
    names: tuple[Pool, ...] = ("easy", "hard")
    pools = data.draw(st.dictionaries(st.integers(0, num_rows - 1), st.sampled_from(names)))
    shares: dict[Pool, int] = {
        "easy": data.draw(st.integers(0, num_groups // 2)),
        "hard": data.draw(st.integers(0, num_groups // 2)),
    }
    position = data.draw(st.integers(0, 3 * num_rows))
    place = {"seed": seed, "step": 3, "num_groups": num_groups, "num_rows": num_rows}
    rows, after = choose_rows(pools, shares, position=position, **place)
    assert len(rows) == num_groups
    assert len(set(rows)) == min(num_groups, num_rows)
    normal = num_rows - len(pools)
    for pool, share in shares.items():
        has = sum(its == pool for its in pools.values())
        drawn = sum(pools.get(row) == pool for row in set(rows))
        assert drawn >= min(share, has)
        if normal >= num_groups:
            assert drawn == min(share, has)
    assert after >= position
    assert (rows, after) == choose_rows(pools, shares, position=position, **place)


@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 99), st.integers(1, 5))
def test_rows_are_those_of_the_schedule_while_no_pool_has_any(
    num_groups: int, num_rows: int, seed: int, step: int
) -> None:
    """Up to the first end of an epoch, after which a step leaves out what it has already."""
    position = (step - 1) * num_groups
    rows, after = choose_rows(
        {},
        {"easy": 0, "hard": 0},
        seed=seed,
        step=step,
        num_groups=num_groups,
        num_rows=num_rows,
        position=position,
    )
    if step * num_groups <= num_rows:
        same = schedule.step_rows(seed, step=step, batch=num_groups, num_rows=num_rows)
        assert rows == tuple(same)
        assert after == step * num_groups


@pytest.mark.parametrize("num_groups", [2, 7, 32])
def test_shares_are_the_fractions_over_many_steps(num_groups: int) -> None:
    table = Curriculum(**BOTH, hard_fraction=0.1, easy_fraction=0.25)
    total: dict[str, int] = {"easy": 0, "hard": 0}
    for number in range(1, 101):
        shares = table.shares(number, num_groups)
        assert sum(shares.values()) <= num_groups
        for pool, share in shares.items():
            total[pool] += share
    assert total == {"easy": 25 * num_groups, "hard": 10 * num_groups}


def settled(*results: float | str | None) -> SettledGroup:
    """A group with these rewards; a text is the category of a failure."""
    entries = tuple(
        SampleEntry(index=n, failure=result if isinstance(result, str) else None)
        for n, result in enumerate(results)
    )
    rewards = tuple(None if isinstance(result, str) else result for result in results)
    group = BatchGroup(slot=0, replacement=0, artifact=ref("g"), rewards=rewards)
    return SettledGroup(group=group, entries=entries)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ((1.0, 1.0, 0.0, 2.0), (3, 4)),
        ((0.999, 1.0), (1, 2)),
        ((1.0, None), (1, 1)),
        ((1.0, "timeout"), (1, 2)),
        ((1.0, "infrastructure"), (1, 1)),
        ((None, None), None),
    ],
)
def test_a_sample_counts_if_its_policy_decided_its_result(
    results: tuple[float | str | None, ...], expected: tuple[int, int] | None
) -> None:
    table = Curriculum(**BOTH)
    pools = measure(RowPools(), table, step=1, row=4, group=settled(*results))
    assert pools.measured.get(1, {}).get(4) == expected


def test_a_chosen_reward_is_that_of_a_pass() -> None:
    table = Curriculum(**BOTH, pass_reward=0.5)
    pools = measure(RowPools(), table, step=1, row=4, group=settled(0.5, 0.4, 0.0))
    assert pools.measured == {1: {4: (1, 3)}}


def test_groups_of_one_row_in_a_step_are_measured_together_and_a_later_step_replaces_them() -> None:
    table, pools = Curriculum(**BOTH), RowPools()
    for results in ((0.0, 0.0), (1.0, 1.0)):
        pools = measure(pools, table, step=1, row=4, group=settled(*results))
    assert decide_moves(pools, table, step=2, measured_up_to=1) == {}
    pools = measure(pools, table, step=2, row=4, group=settled(1.0, 1.0))
    assert decide_moves(pools, table, step=3, measured_up_to=1) == {}
    assert decide_moves(pools, table, step=3, measured_up_to=2) == {4: "easy"}


@pytest.mark.parametrize(
    ("rate", "pool"), [(0.0, "hard"), (0.1, None), (0.5, None), (0.9, None), (1.0, "easy")]
)
def test_both_bounds_belong_to_the_rows_in_no_pool(rate: float, pool: str | None) -> None:
    assert Curriculum(**BOTH).pool_of(rate) == pool


def replay(seed: int, *, depth: int, replaces: bool) -> list[tuple[int, ...]]:
    """The rows and moves of each step of a run whose groups are graded in the order of this seed."""
    draw = random.Random(seed)
    modes = {0: "sync", 1: "one_step_off_async"}
    more: dict[str, Any] = {"execution_mode": modes.get(depth, "fully_async")}
    if depth > 1:
        more["max_steps_off_policy"] = depth
    if replaces:
        more |= {"algorithm": "dapo", "max_replacements": 2}
    curriculum = {**BOTH, "hard_fraction": 0.3}
    story, events = begun(steps=6, curriculum=curriculum, **more)
    todo: list[Any] = _answers(events)
    paused = False
    while todo or paused:
        if paused or draw.random() < 0.1:
            ask = RunResumeRequested if paused else RunPauseRequested
            events = story.tell(ask(run="r1")).events
        else:
            events = story.tell(_grade(todo.pop(draw.randrange(len(todo))))).events
        todo += _answers(events)
        names = [event.type for event in events]
        paused = "rl.run.paused" in names or (paused and "rl.run.resumed" not in names)
    found = [
        (event.step, slot.slot, slot.replacement, slot.row)
        for event in story.told
        if isinstance(event, GroupsRequested)
        for slot in event.slots
    ]
    moves = [
        (e.step, e.position, *e.easy, *e.hard, *e.left)
        for e in story.told
        if isinstance(e, PoolsDecided)
    ]
    assert any(len(move) > 2 for move in moves), "rows move"
    return sorted([*found, *moves])


def _answers(events: Sequence[Event]) -> list[Any]:
    found: list[Any] = []
    for event in events:
        if isinstance(event, GroupsRequested):
            found += event.group_specs()
        elif isinstance(event, BatchAssembled):
            found.append(updated(event.step))
    return found


def _grade(message: Any) -> Any:
    """The rewards of a group are a function of its place alone, as every recorded fact is."""
    if not isinstance(message, GroupSpec):
        return message
    kind = random.Random(message.group).random()
    rewards = (1.0, 1.0) if kind < 0.4 else (0.0, 0.0) if kind < 0.6 else (0.0, 1.0)
    return graded(message, *rewards)


@examples(4)
@given(st.integers(0, 2**32), st.sampled_from([0, 1, 3]), st.booleans())
def test_rows_and_pools_do_not_depend_on_the_order_of_grading(
    seed: int, depth: int, replaces: bool
) -> None:
    told = replay(seed, depth=depth, replaces=replaces)
    assert told == replay(seed + 1, depth=depth, replaces=replaces)


def test_a_late_grade_of_a_settled_slot_measures_nothing() -> None:
    story, events = begun()
    first = of(events, GroupsRequested)
    spec = first.group_specs()[0]
    story.tell(graded(spec, 0.0, 1.0)).then_types(GroupsSettled)
    story.tell(graded(spec, 1.0, 1.0)).then_nothing()
    assert only(story.tell(graded(first.group_specs()[1])), BatchAssembled)
    assert of(story.tell(updated(1)).events, PoolsDecided).easy == ()


OVER: dict[str, Any] = {"oversampling_factor": 2.0}
FLAT, DIFFERS = (1.0, 1.0), (0.0, 1.0)


def grade_slots(
    story: Story, request: GroupsRequested, *results: Sequence[float | None], reverse: bool = False
) -> list[Event]:
    """Grade the groups of a request, whose slots have these rewards."""
    specs = list(zip(request.group_specs(), results, strict=True))
    for spec, rewards in reversed(specs) if reverse else specs:
        events = story.tell(graded(spec, *rewards)).events
    return events


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("results", "slots"),
    [
        ((DIFFERS, DIFFERS, DIFFERS, DIFFERS), [0, 1]),
        ((FLAT, DIFFERS, FLAT, DIFFERS), [1, 3]),
        ((FLAT, FLAT, FLAT, DIFFERS), [0, 3]),
        ((FLAT, FLAT, FLAT, FLAT), [0, 1]),
        (((None, None), FLAT, DIFFERS, (None, 1.0)), [1, 2]),
    ],
)
def test_a_batch_has_the_first_groups_that_differ_whatever_was_graded_first(
    results: tuple[Sequence[float | None], ...], slots: list[int], reverse: bool
) -> None:
    story, events = begun(curriculum=OVER)
    first = of(events, GroupsRequested)
    assert [slot.slot for slot in first.slots] == [0, 1, 2, 3]
    assert not [event for event in events if isinstance(event, PoolsDecided)]
    batch = of(grade_slots(story, first, *results, reverse=reverse), BatchAssembled)
    assert [group.slot for group in batch.groups] == slots
    usable = sum(None not in rewards for rewards in results)
    assert batch.metrics["rollout/spare_groups"] == usable - 2
    assert batch.metrics["rollout/num_samples"] == 8, "the figures count all that was sampled"


def test_a_filter_drops_groups_and_others_take_their_place_without_replacements() -> None:
    story, events = begun(curriculum=OVER, algorithm="dapo")
    first = of(events, GroupsRequested)
    events = grade_slots(story, first, FLAT, FLAT, DIFFERS, FLAT)
    batch = of(events, BatchAssembled)
    assert [group.slot for group in batch.groups] == [2]
    assert len([event for event in story.told if isinstance(event, GroupsRequested)]) == 1


def test_replacements_are_made_as_well_if_the_config_asks_for_them() -> None:
    story, events = begun(curriculum=OVER, algorithm="dapo", max_replacements=1)
    first = of(events, GroupsRequested)
    again = of(story.tell(graded(first.group_specs()[0], *FLAT)).events, GroupsRequested)
    assert [(slot.slot, slot.replacement) for slot in again.slots] == [(0, 1)]


def test_all_groups_that_were_sampled_are_measured() -> None:
    story, events = begun(curriculum={**OVER, **BOTH})
    first = of(events, GroupsRequested)
    grade_slots(story, first, FLAT, DIFFERS, DIFFERS, FLAT)
    rows = [slot.row for slot in first.slots]
    decided = of(story.tell(updated(1)).events, PoolsDecided)
    assert decided.easy == tuple(sorted((rows[0], rows[3])))


@pytest.mark.parametrize(("factor", "batch", "groups"), [(1.1, 10, 11), (1.5, 3, 5), (4.0, 2, 8)])
def test_a_step_samples_so_many_times_its_batch_rounded_up(
    factor: float, batch: int, groups: int
) -> None:
    assert Curriculum(oversampling_factor=factor).num_groups(batch) == groups
    assert Curriculum(**BOTH).num_groups(batch) == batch


@pytest.mark.parametrize("num_normal", [1, 5, 40, 200])
def test_few_rows_in_no_pool_are_found_as_if_every_place_was_looked_at(num_normal: int) -> None:
    num_rows, position = 2_000, 1_990
    normal = set(random.Random(num_normal).sample(range(num_rows), num_normal))
    pools: dict[int, Pool] = {row: "hard" for row in range(num_rows) if row not in normal}
    places = range(position, position + 2 * num_rows)
    visited = [(schedule.row_at(n, seed=3, num_rows=num_rows), n) for n in places]
    first = dict(reversed([(row, n) for row, n in visited if row in normal]))
    expected = sorted(first, key=first.__getitem__)[:8]
    rows, after = choose_rows(
        pools, {}, seed=3, step=1, num_groups=8, num_rows=num_rows, position=position
    )
    assert set(rows) >= set(expected)
    assert after == first[expected[-1]] + 1
