"""The cost ledger over HTTP, its tenants, and budgets at submit and at resume."""

from typing import Any
from uuid import uuid4

import pytest

from producers.cli.commands.upkeep.cost import MOST_LINES
from schemas.costs.work import Work
from schemas.events import (
    BudgetExhausted,
    GroupGraded,
    PolicyUpdated,
    RunPaused,
    RunStarted,
    StepSettled,
)
from schemas.ids import GroupKey, Purpose
from schemas.specs import GroupSpec
from tests.kit.application import Application, rows
from tests.kit.specs import ref, template
from tests.kit.story import whole_run
from tests.kit.tenants import ask, tenant
from tests.unit.producers.http.test_submit import config

pytestmark = pytest.mark.postgres

WORK = Work(effect="TrainStep", device="cpu", device_s=1000.0, wasted_s=500.0)
ADDRESSES = ("/repo", "/repo")


async def settle(app: Application) -> None:
    await app.services.readmodel.caught_up(await app.services.log.visible_head())


async def add_work(app: Application, run: str) -> None:
    """Record a step of a run that took 1500 s of the CPU, a third of them wasted."""
    steps = [e for e in whole_run(run, "any", steps=1) if isinstance(e, PolicyUpdated)]
    event = steps[0].model_copy(update={"step": 99, "work": WORK})
    await app.services.log.append([event], cause=uuid4())


async def test_each_tenant_sees_the_costs_of_its_own_runs(app: Application) -> None:
    first, second = [
        await tenant(app, name, url) for name, url in zip("ab", ADDRESSES, strict=True)
    ]
    for one in (first, second, second):
        await add_work(app, one.run)
    await settle(app)
    for who, hours in ((first, 1500 / 3600), (second, 3000 / 3600)):
        for by in ("run", "workspace", "organisation", "user", "step"):
            found = (await ask(app, "GET", f"/api/v1/cost?by={by}", who.api_key)).json()
            assert found["total"]["device_hours"] == {"cpu": pytest.approx(hours)}, by
            assert found["total"]["wasted"] == {"TrainStep": pytest.approx(hours * 1200)}
            assert found["total"]["cost"] is None
            assert found["total"]["unpriced_devices"] == ["cpu"]
    foreign = await ask(app, "GET", f"/api/v1/cost?run={second.run}", first.api_key)
    assert foreign.status_code == 404
    everything = await app.get("/cost", by="workspace")
    assert [line["workspace_name"] for line in everything["lines"]] == ["b", "a"]
    assert [line["name"] for line in everything["lines"]] == [None, None], "of which of its runs?"
    shown = await app.get(f"/runs/{second.run}")
    assert shown["cost"]["effects"] == {"TrainStep": pytest.approx(3000)}
    listed = (await app.get("/runs", cost="true"))["runs"]
    assert {one["id"]: one["cost"]["effects"] for one in listed}.keys() == {first.run, second.run}
    assert (await app.get("/cost", since="1d"))["total"]["device_hours"]
    assert not (await app.get("/cost", since="2099-01-01"))["lines"]


async def test_the_command_line_gets_the_lines_of_all_steps_of_a_long_run(app: Application) -> None:
    """It asked for no number, and showed the first 1,000 without a word."""
    one = await tenant(app, "a", "/repo")
    step = next(e for e in whole_run(one.run, "any", steps=1) if isinstance(e, PolicyUpdated))
    for number in (7, 8):
        event = step.model_copy(update={"step": number, "work": WORK})
        await app.services.log.append([event], cause=uuid4())
    await settle(app)
    some = await app.get("/cost", by="step", run=one.run, limit=1)
    assert (len(some["lines"]), some["num_lines"] > 1) == (1, True)
    everything = await app.get("/cost", by="step", run=one.run, limit=MOST_LINES)
    assert len(everything["lines"]) == everything["num_lines"] == some["num_lines"]
    assert MOST_LINES > 38_461, "the steps of the longest run of docs/benchmarks.md"


async def test_an_evaluation_is_named_as_its_line_among_the_runs_is(app: Application) -> None:
    one = await tenant(app, "a", "/repo")
    group = str(GroupKey(one.evaluation, Purpose.EVALUATE, 0, 0))
    of = template().model_copy(update={"run": None})
    spec = GroupSpec(group=group, row=0, template=of)
    grade = GroupGraded(spec=spec, artifact=ref("g"), entries=(), grades=(), work=WORK)
    await app.services.log.append([grade], cause=uuid4())
    await settle(app)
    found = await app.get("/cost", run=one.evaluation)
    assert [line["key"] for line in found["lines"]] == [one.evaluation]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("by=day", "by must be one of run"),
        ("since=soon", "since must be a time such as 7d"),
        ("since=99999999d", "since must be a time such as 7d"),
        ("since=0001-01-01T00:00:00%2B23:59", "since must be a time such as 7d"),
        ("since=9999-12-31T23:59:59-23:59", "since must be a time such as 7d"),
        ("by=sample", "name the run too"),
        ("run=nobody", "nobody"),
    ],
)
async def test_a_question_that_the_ledger_cannot_answer_is_refused(
    app: Application, query: str, said: str
) -> None:
    answer = await app.api.get(f"/api/v1/cost?{query}")
    assert answer.status_code in (400, 404)
    assert said in answer.text


@pytest.fixture
async def ready(app: Application) -> Application:
    assert (await app.upload("numbers", rows(8))).status_code == 200
    assert (await app.post("/workspaces", {"url": "/repo", "name": "w"})).status_code == 201
    return app


def limited(**limits: Any) -> dict[str, Any]:
    return {**config(), "budget": limits}


async def test_a_budget_of_money_needs_prices(ready: Application) -> None:
    refused = await ready.post("/runs", {"config": limited(max_cost=5)})
    assert refused.status_code == 400
    assert "HEADRACE_PRICES" in refused.text
    for bad in ({"max_cost": -1}, {"max_tokens": 1.5}, {"max_euro": 5}, {"max_hours": 0}):
        refused = await ready.post("/runs", {"config": limited(**bad)})
        assert refused.status_code == 400
        assert f"budget.{next(iter(bad))}" in refused.text
    evident = await ready.post("/runs", {"config": limited(max_tokens=1), "name": "a"})
    assert evident.status_code == 201, evident.text
    assert "pauses before step 2" in evident.json()["warnings"][-1]


async def test_an_exhausted_run_goes_on_only_with_a_larger_limit(ready: Application) -> None:
    made = await ready.post("/runs", {"config": limited(max_hours=2), "name": "a"})
    run = made.json()["run"]["id"]
    told = {"limit": "max_hours", "most": 2.0, "used": 1.5, "estimate": 0.7}
    started = [e for e in whole_run(run, "a", steps=1) if isinstance(e, RunStarted)]
    exhausted = BudgetExhausted.model_validate({"run": run, "step": 1, **told})
    paused = RunPaused(run=run, step=1, reason="why")
    for event in (*started, exhausted, paused):
        await ready.services.log.append([event], cause=uuid4())
    plain = await ready.post(f"/runs/{run}/resume", {})
    assert plain.status_code == 409
    assert "--raise max_hours=AMOUNT" in plain.text
    for raised in ({"max_hours": 2}, {"max_hours": 1.9}, {"max_tokens": 9}):
        assert (await ready.post(f"/runs/{run}/resume", {"raise": raised})).status_code == 409
    unpriced = await ready.post(f"/runs/{run}/resume", {"raise": {"max_cost": 9}})
    assert "began without prices" in unpriced.text
    for bad in ({"max_hours": -1}, {"hours": 3}, {"max_hours": "many"}):
        refused = await ready.post(f"/runs/{run}/resume", {"raise": bad})
        assert refused.status_code == 400, refused.text
    assert (await ready.post(f"/runs/{run}/pause", {"raise": {}})).status_code == 400
    answer = await ready.post(f"/runs/{run}/resume", {"raise": {"max_hours": 3}})
    assert answer.status_code == 200, answer.text


async def test_a_dry_run_says_what_like_runs_cost(ready: Application) -> None:
    first = await ready.post("/runs", {"config": config(), "name": "first"})
    run = first.json()["run"]["id"]
    dry = {"config": config(), "dry_run": True}
    assert "past" not in (await ready.post("/runs", dry)).json()["estimates"]
    settled = [e for e in whole_run(run, "a", steps=2) if isinstance(e, StepSettled)]
    for event in settled:
        await ready.services.log.append([event], cause=uuid4())
    await add_work(ready, run)
    await settle(ready)
    answer = (await ready.post("/runs", dry)).json()
    past, steps = answer["estimates"]["past"], answer["total_steps"]
    assert past["runs"] == ["first"]
    assert past["step_s"] == {"cpu": 750.0}
    assert past["device_hours"] == {"cpu": pytest.approx(750 * steps / 3600)}
    assert past["cost"] is None
    other = config()
    other["training"] = {**other.get("training", {}), "n_samples_per_prompt": 3}
    unlike = await ready.post("/runs", {"config": other, "dry_run": True})
    assert "past" not in unlike.json()["estimates"]
