"""Curves are thinned in the database: with their ends and extremes, or by points evenly apart."""

import itertools
import math
from datetime import UTC, datetime, timedelta

import pytest

from infra.readmodel.runs import Runs
from infra.spine.postgres.pool import Database

pytestmark = pytest.mark.postgres

AT = datetime(2026, 1, 1, tzinfo=UTC)
INSERT = """insert into metric_points (run, key, step, value, at)
select 'r', $1, step, value, $4::timestamptz + step * interval '1 second'
from unnest($2::int[], $3::float8[]) as p (step, value)"""


async def _add(database: Database, key: str, values: dict[int, float]) -> None:
    await database.durable.execute(INSERT, key, list(values), list(values.values()), AT)


async def test_a_long_curve_keeps_its_ends_and_its_extremes(database: Database) -> None:
    values = {step: math.sin(step / 50) for step in range(1, 5001)}
    values[1234], values[4000] = 7.0, -7.0
    await _add(database, "loss", values)
    found = (await Runs(database).thinned_curves("r", ["loss", "none"], most=100))["loss"]
    assert 50 <= len(found) <= 102
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    assert (found[0], found[-1]) == ((1, values[1]), (5000, values[5000]))
    assert all(values[step] == value for step, value in found)
    assert {(1234, 7.0), (4000, -7.0)} <= set(found)


async def test_a_short_curve_keeps_all_its_points(database: Database) -> None:
    values = {step: step * 0.5 for step in range(0, 200, 20)}
    await _add(database, "eval", values)
    found = await Runs(database).thinned_curves("r", ["eval", "none"], most=400)
    assert found == {"eval": list(values.items())}


async def test_values_that_are_no_numbers_do_not_hide_others(database: Database) -> None:
    values = dict.fromkeys(range(100), 1.0) | {50: math.nan, 60: math.inf}
    values |= dict.fromkeys(range(80, 90), math.nan)
    await _add(database, "loss", values)
    found = dict((await Runs(database).thinned_curves("r", ["loss"], most=40))["loss"])
    assert found[60] == math.inf
    assert 50 not in found
    assert any(math.isnan(found.get(step, 0.0)) for step in range(80, 90))
    await _add(database, "nan", {3: math.nan})
    only = (await Runs(database).thinned_curves("r", ["nan"], most=40))["nan"]
    assert [step for step, _ in only] == [3]
    assert math.isnan(only[0][1])


async def test_a_part_of_a_curve_begins_with_its_time(database: Database) -> None:
    await _add(database, "loss", {step: float(step) for step in range(1000)})
    since = AT + timedelta(seconds=990)
    found = await Runs(database).thinned_curves("r", ["loss"], most=40, since=since)
    assert found == {"loss": [(step, float(step)) for step in range(990, 1000)]}
    later = AT + timedelta(days=1)
    assert await Runs(database).thinned_curves("r", ["loss"], most=40, since=later) == {}


async def test_a_part_that_is_chosen_is_exact(database: Database) -> None:
    values = {step: math.sin(step) for step in range(1, 5001)}
    await _add(database, "loss", values)
    found = await Runs(database).thinned_curves("r", ["loss"], most=200, steps=(700, 780))
    assert found == {"loss": [(step, values[step]) for step in range(700, 781)]}
    none = await Runs(database).thinned_curves("r", ["loss"], most=200, steps=(6000, 7000))
    assert none == {}


async def test_points_evenly_apart_are_those_of_the_curve(database: Database) -> None:
    dense = {step: math.sin(step / 50) for step in range(1, 5001)}
    sparse = {step: step * 0.5 for step in range(0, 5000, 1700)}
    await _add(database, "loss", dense)
    await _add(database, "eval", sparse)
    await _add(database, "one", {7: 1.0})
    found = await Runs(database).sampled_curves("r", ["loss", "eval", "one", "none"], most=100)
    assert set(found) == {"loss", "eval", "one"}
    assert 100 <= len(found["loss"]) <= 105
    assert found["loss"] == [(step, dense[step]) for step, _ in found["loss"]]
    gaps = {b - a for (a, _), (b, _) in itertools.pairwise(found["loss"])}
    assert max(gaps) == 49
    assert (found["loss"][0][0], found["loss"][-1][0]) == (1, 5000)
    assert found["eval"] == list(sparse.items())
    assert found["one"] == [(7, 1.0)]
    since = AT + timedelta(seconds=4000)
    part = await Runs(database).sampled_curves("r", ["loss"], most=9, since=since, steps=(0, 4500))
    assert (part["loss"][0][0], part["loss"][-1][0]) == (4000, 4500)


async def test_marks_are_the_newest_of_each_kind_in_order(database: Database) -> None:
    await database.durable.execute(
        """insert into log_lines (run, xid, position, line, at, level, step, message)
        select 'r', step, step, 0, $1, case when step % 2 = 0 then 'warning' else 'info' end, step,
        'slow'
        from generate_series(1, 20) step""",
        AT,
    )
    found = await Runs(database).marks("r", steps=(3, 15), most=4)
    assert [(mark.step, mark.kind, mark.text) for mark in found] == [
        (step, "warning", "slow") for step in (8, 10, 12, 14)
    ]
