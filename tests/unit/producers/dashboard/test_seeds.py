"""Runs that differ in their seed only, as one group."""

import json
import math

import httpx
import pytest

from producers.dashboard.overlay import MeanPoint, band, mean_points
from producers.dashboard.pages.comparisons.compare import without_seed
from tests.kit.application import Application
from tests.kit.showcase import FIRST, PAUSED, SECOND
from tests.kit.tenants import tenant


def test_the_mean_of_a_step_is_that_of_the_runs_that_have_it() -> None:
    points = mean_points({2: [1.0], 1: [0.0, 1.0, math.nan], 3: [math.nan]})
    assert points == [MeanPoint(1, 0.5, math.sqrt(0.5), 2), MeanPoint(2, 1.0, 0.0, 1)]


def test_the_band_is_around_the_mean() -> None:
    drawn = band([MeanPoint(1, 0.0, 1.0, 2), MeanPoint(2, 0.0, 0.5, 2)])
    assert drawn is not None
    assert (drawn.least, drawn.largest) == (-1.0, 1.0)
    assert drawn.line == "0.0,75.0 600.0,75.0"
    assert drawn.area == "0.0,150.0 600.0,112.5 600.0,37.5 0.0,0.0"
    assert band([MeanPoint(1, 0.0, 1.0, 2)]) is None


def test_only_the_seed_is_left_out_of_a_config() -> None:
    one, other = ({"advanced": {"seed": n, "algorithm": "grpo"}, "x": 1} for n in (3, 4))
    assert without_seed(json.dumps(one))[0] == without_seed(json.dumps(other))[0]
    assert without_seed(json.dumps(one))[1] == 3
    assert without_seed(json.dumps(one | {"x": 2}))[0] != without_seed(json.dumps(one))[0]
    assert without_seed("{}") == ({}, 0)


@pytest.fixture
def showcase_steps() -> int:
    return 3


async def make_seed(app: Application, run: str, seed: int) -> None:
    """Give a run the settings of FIRST with another seed."""
    await app.database.durable.execute(
        """update runs r set algorithm = f.algorithm,
        config = jsonb_set(f.config::jsonb, '{advanced,seed}', to_jsonb($3::int))::text
        from runs f where f.run = $1 and r.run = $2""",
        FIRST,
        run,
        seed,
    )


@pytest.mark.postgres
async def test_runs_of_other_seeds_are_one_group_with_mean_and_band(
    app: Application, browser: httpx.AsyncClient
) -> None:
    alone = (await browser.get(f"/runs/{FIRST}/seeds")).text
    assert "No other run differs from this one in its seed only." in alone
    await make_seed(app, SECOND, 7)
    await app.database.durable.execute(
        "update metric_points set value = value + 1 where run = $1", SECOND
    )
    page = (await browser.get(f"/runs/{FIRST}/seeds")).text
    assert "mean of 2 runs" in page
    assert '<polygon class="band"' in page
    found = (await browser.get(f"/runs/{SECOND}/seeds.json")).json()
    assert [(one["seed"], one["id"]) for one in found["runs"]] == [(0, FIRST), (7, SECOND)]
    first = found["curves"]["rollout/raw_reward"][0]
    curves = (await browser.get(f"/compare.json?runs={FIRST},{SECOND}")).json()["runs"]
    values = [dict(one["rollout/raw_reward"])[first["step"]] for one in curves.values()]
    assert first["num_runs"] == 2
    assert math.isclose(first["mean"], sum(values) / 2)
    assert math.isclose(first["deviation"], abs(values[0] - values[1]) / math.sqrt(2))
    compared = (await browser.get(f"/compare?runs={FIRST},{SECOND}")).text
    assert "These runs differ in their seed only." in compared
    other = (await browser.get(f"/compare?runs={FIRST},{PAUSED}")).text
    assert "in their seed only" not in other


@pytest.mark.postgres
async def test_a_group_has_no_runs_of_another_workspace_or_code(
    app: Application, browser: httpx.AsyncClient
) -> None:
    for number, column in enumerate(("workspace", "commit_sha", "model", "dataset_ref")):
        await make_seed(app, SECOND, number + 1)
        kept = await app.database.durable.fetchval(
            f"select {column} from runs where run = $1",
            SECOND,
        )
        change = f"update runs set {column} = $2 where run = $1"
        await app.database.durable.execute(change, SECOND, "other")
        found = (await browser.get(f"/runs/{FIRST}/seeds.json")).json()["runs"]
        assert [one["id"] for one in found] == [FIRST], column
        await app.database.durable.execute(change, SECOND, kept)
    ours = await tenant(app, "ours", "/repo")
    await browser.post("/login", data={"api_key": ours.api_key})
    assert (await browser.get(f"/runs/{FIRST}/seeds")).status_code == 404
