"""Rows whose results changed between two checkpoints or evaluations."""

import re

import httpx
import pytest

from producers.dashboard.pages.comparisons.row_changes import sort_changes
from schemas.events import EvaluationCompleted, EvaluationRequested, Event
from tests.kit.application import Application
from tests.kit.history import keep
from tests.kit.specs import template
from tests.kit.story import batch_of
from tests.unit.producers.http.routes.test_evaluations import (
    LOST,
    beginning,
    dataset,
    evaluated,
    grade,
)
from tests.unit.producers.http.test_checkpoint_comparison import graded, run_with_validation

pytestmark = pytest.mark.postgres


def test_the_largest_differences_come_first_and_equal_rows_are_left_out() -> None:
    rows = [
        {"row": 0, "change": "same", "reward": [1.0, 1.0]},
        {"row": 1, "change": "gained", "reward": [0.0, 0.5]},
        {"row": 2, "change": "lost", "reward": [1.0, 0.0]},
        {"row": 3, "change": "same", "reward": [0.1, 0.2]},
        {"row": 4, "change": "missing", "reward": [None, 1.0]},
    ]
    assert [row["row"] for row in sort_changes(rows)] == [2, 1, 3, 4]


async def test_two_checkpoints_are_compared_row_by_row(
    app: Application, browser: httpx.AsyncClient
) -> None:
    data = await dataset(app)
    events: list[Event] = [
        *run_with_validation("r1", "first"),
        *graded("r1", 1, (0.0, 1.0, 0.5, 1.0)),
        EvaluationRequested(
            evaluation="r1v2",
            eval_name="r1v2",
            template=template(num_samples=1, dataset=data),
            rows=(0, 1, 2, 3),
            run="r1",
            step=2,
        ),
        *graded("r1", 2, (1.0, 0.0, 0.75, 1.0)),
    ]
    for row in range(4):
        await keep(app, batch_of(f"r1v2-evaluate-0-{row}-0"))
    for event in events:
        await app.append([event])
    await app.services.readmodel.names.take("run", "first", "r1")
    chosen = {"a": "first@1", "b": "first@2"}
    page = await browser.get("/compare/checkpoints", params=chosen)
    assert page.status_code == 200, page.text
    assert "1 gained, 1 lost, 2 pass as before" in page.text
    assert "0.625 <small" in page.text
    assert re.findall(r'title="95 % interval">([^<]*)<', page.text) == [
        "-0.137 to 1.387",
        "-0.0655 to 1.441",
    ]
    assert page.text.count('<th scope="row">') == 3 + 1  # three rows that changed, one figure
    found = (await browser.get("/compare/checkpoints.json", params=chosen)).json()
    assert found["counts"]["lost"] == 1
    csv = (await browser.get("/compare/checkpoints.csv", params=chosen)).text.splitlines()
    assert csv[0] == "row,change,reward_a,reward_b,difference,passed_a,passed_b"
    assert csv[1:3] == ["0,gained,0.0,1.0,1.0,0,1", "1,lost,1.0,0.0,-1.0,1,0"]
    assert '<a href="/evals/r1v1/samples?row=0">' in page.text
    assert '<a href="/evals/r1v2/samples?row=0">' in page.text
    answers = (await browser.get("/evals/r1v2/samples.json?row=0&colour=logprob")).json()
    assert answers["group"] == "r1v2-evaluate-0-0-0"
    assert answers["samples"][0]["reward"] == 1.0
    empty = await browser.get("/compare/checkpoints")
    assert "Name two checkpoints" in empty.text
    assert (await browser.get("/compare/checkpoints?a=first@1")).status_code == 400
    assert (await browser.get("/compare/checkpoints.json")).status_code == 400
    missing = await browser.get("/compare/checkpoints", params={**chosen, "b": "first@7"})
    assert missing.status_code == 404


async def test_two_evaluations_are_compared_with_their_questions(
    app: Application, browser: httpx.AsyncClient
) -> None:
    data = await dataset(app)
    await evaluated(app, "one", data, (1.0, None), (0.0, 0.5), failure=LOST)
    await evaluated(app, "two", data, (1.0, 0.0), (1.0, 0.5), ends=(0.25, 0.75))
    page = await browser.get("/compare/evaluations?chosen=one&chosen=two")
    assert "1 gained, 1 lost" in page.text
    assert "(95 % interval -6.353 to 6.353)" in page.text
    figure = '<th scope="row">eval/pass@1</th><td class="figure">0.5</td><td class="figure">0.5 '
    assert f'{figure}<small class="dim" title="95 % interval">0.25 to 0.75</small>' in page.text
    assert "Note:" not in page.text
    await evaluated(app, "three", data, (1.0, 1.0))
    page = await browser.get("/compare/evaluations?a=two&b=three")
    assert "Note: the figures are of 2 rows in two and 1 in three" in page.text
    other = await dataset(app, "others")
    await evaluated(app, "four", other, (1.0, 1.0))
    refused = await browser.get("/compare/evaluations?a=one&b=four")
    assert refused.status_code == 409
    assert "compare evaluations of one dataset" in refused.text


async def test_an_evaluation_and_the_list_show_intervals(
    app: Application, browser: httpx.AsyncClient
) -> None:
    data = await dataset(app)
    groups = [
        await grade(app, "one", rewards, slot=slot, data=data)
        for slot, rewards in enumerate([(1.0, None), (0.0, 0.5)])
    ]
    figures = {
        "eval/reward": 0.375,
        "eval/reward/se": 0.1,
        "eval/reward/low": 0.15,
        "eval/reward/high": 0.6,
        "eval/left_out": 0.0,
    }
    done = EvaluationCompleted(evaluation="one", status="finished", reward=0.375, metrics=figures)
    await app.append([*beginning("one", data), *groups, done])
    page = (await browser.get("/evals/one")).text
    assert "0.15 to 0.6" in page
    assert "eval/reward/low" not in page
    assert "counts as 0" in page
    assert "0.15 to 0.6" in (await browser.get("/evals")).text
    await evaluated(app, "two", data, (1.0, None), (0.0, 0.5))
    assert "leave out every attempt that failed" in (await browser.get("/evals/two")).text
