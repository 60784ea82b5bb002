"""Reward health: bounded work, and groups that teach nothing."""

import math

import httpx
import pytest

from producers.dashboard.charts import MOST_DOTS, scatter
from producers.dashboard.lengths import length_bins
from producers.dashboard.pages.health import SHOWN_STEPS, step_health, thinned_steps
from schemas.errors import FailureCategory
from schemas.sampling import Grade, SampleFailure
from tests.kit.application import Application
from tests.kit.showcase import FIRST, fill

HERE = "http://127.0.0.1"


def test_a_long_run_is_shown_at_few_steps_and_at_its_last_one() -> None:
    steps = thinned_steps(10_000)
    assert len(steps) == len(set(steps)) == SHOWN_STEPS
    assert steps[-1] == 10_000
    assert thinned_steps(3) == [1, 2, 3]
    assert thinned_steps(0) == []


def test_groups_with_equal_rewards_are_counted_and_samples_without_a_reward_are_not() -> None:
    same = (Grade(index=0, reward=1.0), Grade(index=1, reward=1.0), Grade(index=2, reward=None))
    spread = (Grade(index=0, reward=0.0), Grade(index=1, reward=1.0))
    health = step_health([same, spread], 0.0, 1.0)
    assert health["same"] == 1
    assert health["mean"] == 0.75
    assert health["bins"] == [1, 0, 0, 0, 0, 0, 0, 0, 0, 3]


def test_the_mean_counts_what_the_policy_made_fail_as_0_and_leaves_other_failures_out() -> None:
    made_fail, broken = (
        SampleFailure(category=category, message="why")
        for category in (FailureCategory.AGENT, FailureCategory.GRADER)
    )
    group = (
        Grade(index=0, reward=1.0),
        Grade(index=1, reward=None, failure=made_fail),
        Grade(index=2, reward=-1.0, failure=made_fail),
        Grade(index=3, reward=None, failure=broken),
    )
    assert step_health([group], 0.0, 1.0)["mean"] == pytest.approx(1 / 3)


def test_answers_are_binned_by_length_and_none_is_lost() -> None:
    points = [(length, float(length > 50)) for length in range(10, 101)]
    bins = length_bins(points)
    assert len(bins) <= 8
    assert sum(one.samples for one in bins) == len(points)
    assert (bins[0].first, bins[0].mean) == (10, 0.0)
    assert bins[-1].last >= 100
    assert bins[-1].mean == 1.0
    assert length_bins([(5, 1.0), (5, 0.0)])[0].mean == 0.5
    assert length_bins([]) == ()


def test_dots_are_bounded_and_what_is_not_finite_is_not_drawn() -> None:
    found = scatter([(1, 0.0), (3, 1.0), (2, math.nan)], width=100, height=10)
    assert found is not None
    assert found.path == "M0.0 10.0h0M100.0 0.0h0"
    assert scatter([(1, math.inf)], width=1, height=1) is None
    many = scatter([(n, n % 7) for n in range(20 * MOST_DOTS)], width=100, height=10)
    assert many is not None
    assert many.path.count("M") <= MOST_DOTS


@pytest.mark.postgres
async def test_the_figures_of_health_have_length_against_reward(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await fill(app, steps=3)
    page = (await browser.get(f"/runs/{FIRST}/health")).text
    assert '<svg class="dots"' in page
    lengths = (await browser.get(f"/runs/{FIRST}/health.json")).json()["lengths"]
    assert lengths["groups"] == 4
    assert len(lengths["points"]) == sum(one["samples"] for one in lengths["bins"]) == 12
    assert [5, 0.25] in lengths["points"]
