"""Requests for regrades: repeated ones make one, and each that cannot be carried out says why."""

import json
from typing import Any

import pytest

from producers.core.history import regrades
from schemas.effects import RegradeGroups
from schemas.events import (
    Event,
    GradientComparisonCompleted,
    RegradeCompleted,
    RegradePartGraded,
    RegradeRequested,
    RegradeStarted,
    RunRequested,
)
from schemas.events.regrades.figures import report_of, sums_of
from schemas.ids import is_id
from tests.kit.application import Application
from tests.kit.history import ended_run, keep
from tests.kit.specs import ref, rollout_ref
from tests.kit.story import beginning

pytestmark = pytest.mark.postgres

HALVED = {"weights": {"grader": 0.5}}
JUDGED = {"text": "Is it kind?", "model": "openai/gpt-4o"}
LARGE = float("inf")
"""In JSON `1e999`, which is read as infinite."""


@pytest.fixture
async def ended(app: Application) -> Application:
    await ended_run(app)
    await keep(app, b"grades")
    return app


async def refused(app: Application, body: Any, ref: str = "first") -> tuple[int, str]:
    text = json.dumps(body).replace("Infinity", "1e999")
    answer = await app.api.post(f"/api/v1/runs/{ref}/regrades", content=text)
    return answer.status_code, answer.json()["detail"]


async def test_a_request_is_recorded_once_with_the_person_who_made_it(ended: Application) -> None:
    answers = [
        await ended.post("/runs/first/regrades", HALVED, idempotency_key="k") for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [202, 202]
    first, again = (answer.json()["regrade"] for answer in answers)
    assert first["id"] == again["id"]
    assert is_id(first["id"])
    assert (first["run"], first["source"], first["requester"]) == ("r1", "weights", "admin")
    [event] = await ended.recorded("r1", RegradeRequested)
    assert isinstance(event, RegradeRequested)
    assert event.rollout == rollout_ref()
    listed = (await ended.get("/runs/first/regrades"))["regrades"]
    assert [one["id"] for one in listed] == [first["id"]]
    assert (await ended.get(f"/regrades/regrade:{first['id']}"))["regrade"]["id"] == first["id"]
    await ended.services.audit.flush()
    entries = (await ended.get("/audit"))["audit"]
    made = [one for one in entries if one["route"] == "/runs/{ref}/regrades" and one["owner"]]
    assert {(one["owner"], one["status"]) for one in made} >= {("admin", 202)}


async def test_a_key_of_one_request_is_refused_for_another(ended: Application) -> None:
    path = "/runs/first/regrades"
    assert (await ended.post(path, HALVED, idempotency_key="k")).status_code == 202
    for body in ({"weights": {"grader": 2}}, {**HALVED, "share": 0.5}, {**HALVED, "steps": [1, 2]}):
        other = await ended.post(path, body, idempotency_key="k")
        assert (other.status_code, "was used for another" in other.text) == (409, True)
    assert (await ended.post(path, HALVED, idempotency_key="k")).status_code == 202


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "nothing would be graded otherwise"),
        ({"weights": {"lenght": 2}}, "names lenght; the parts of the reward are: grader"),
        ({"weights": {"grader": "2"}}, "must be a number"),
        ({**HALVED, "share": 0}, "above 0 and at most 1"),
        ({**HALVED, "share": 1.5}, "from 0 to 1"),
        ({**HALVED, "steps": [2, 1]}, "within 1..3 of the run, got 2..1"),
        ({**HALVED, "steps": [1, 9]}, "within 1..3 of the run, got 1..9"),
        ({**HALVED, "steps": [0, 1]}, "within 1..3"),
        ({**HALVED, "steps": "1..2"}, "like [1, 9]"),
        ({"rubrics": [{"text": "Is it kind?"}]}, "rubrics[0].model"),
        ({"rubrics": [{"text": "Is it kind?", "model": "nobody/x"}]}, "rubrics[0].model"),
        ({"grader": "main", "tree": "a" * 40}, "beside a commit"),
        ({"tree": "main"}, "40 hex digits"),
        ({"graders": "main"}, "unrecognized field graders"),
        ({"grader": "my branch"}, "grader must be a commit or a branch, got 'my branch'"),
        ({"grader": "--upload-pack=x"}, "grader must be a commit or a branch"),
        ({"grader": "main", "weights": {"": 1}}, "names '', which is not the name of a part"),
        ({"grader": "main", "weights": {"a\0b": 1}}, "which is not the name of a part"),
        ({"rubrics": [{**JUDGED, "weight": LARGE}]}, "rubrics[0].weight must be a finite number"),
        ({"rubrics": [{**JUDGED, "weight": 1e300}]}, "rubrics[0].weight must be from"),
        ({"rubrics": [{**JUDGED, "scale": [1, 0]}]}, "rubrics[0].scale must be two numbers"),
        ({"rubrics": [{**JUDGED, "scale": [0, LARGE]}]}, "rubrics[0].scale must be two numbers"),
        ({"rubrics": [{**JUDGED, "usd_per_million": [0, LARGE]}]}, "must be two prices"),
        ({"rubrics": [{**JUDGED, "text": "y" * 4000}] * 16}, "rubrics have"),
    ],
)
async def test_a_request_that_cannot_be_carried_out_says_why(
    ended: Application, body: Any, text: str
) -> None:
    status, detail = await refused(ended, body)
    assert status == 400
    assert text in detail
    await ended.get("/runs/first/events", limit=1000)


async def test_a_run_has_so_many_regrades_at_once_and_a_repeated_request_is_none_more(
    ended: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regrades, "MOST_AT_ONCE", 2)
    path = "/runs/first/regrades"
    made = [await ended.post(path, HALVED, idempotency_key=key) for key in ("a", "b", "b", "c")]
    assert [answer.status_code for answer in made] == [202, 202, 202, 409]
    assert "run first has 2 regrades that have not ended" in made[-1].json()["detail"]
    await ended.append(completed(made[0].json()["regrade"]["id"]))
    assert (await ended.post(path, HALVED, idempotency_key="c")).status_code == 202


async def test_a_run_without_graded_groups_is_refused(app: Application) -> None:
    await app.append([*beginning("r2", "young", steps=3)])
    status, detail = await refused(app, HALVED, "r2")
    assert (status, "has no graded groups" in detail) == (400, True)


async def test_a_run_that_is_archived_or_absent_is_refused(ended: Application) -> None:
    assert (await refused(ended, HALVED, "no-such-run"))[0] == 404
    archived = await ended.post("/runs/first/archive", {})
    assert archived.status_code == 200, archived.text
    status, detail = await refused(ended, HALVED)
    assert (status, "is archived" in detail) == (409, True)


async def test_gradients_need_an_algorithm_that_learns_from_advantages(app: Application) -> None:
    await ended_run(app)
    [request] = await app.recorded("r1", RunRequested)
    assert isinstance(request, RunRequested)
    assert request.config.advanced.algorithm == "grpo"
    asked = await app.post("/runs/first/regrades", {**HALVED, "gradients": True})
    assert asked.status_code == 202
    assert asked.json()["regrade"]["gradients"] is None, "they follow after the grades"


async def test_a_list_says_of_compared_gradients_what_the_regrade_itself_says(
    ended: Application,
) -> None:
    """The list went on to say that they are running."""
    body = {**HALVED, "gradients": True}
    identity = (await ended.post("/runs/first/regrades", body)).json()["regrade"]["id"]
    *before, last = completed(identity)
    last = last.model_copy(update={"gradients": True})
    for more, status in (
        ([*before, last], "running"),
        ([GradientComparisonCompleted(regrade=identity, run="r1", steps=0)], "finished"),
    ):
        await ended.append(more)
        alone = (await ended.get(f"/regrades/{identity}"))["regrade"]
        [listed] = (await ended.get("/runs/first/regrades"))["regrades"]
        assert alone["gradients"]["status"] == listed["gradients"]["status"] == status


def completed(identity: str) -> list[Event]:
    sums = sums_of((0.0, 1.0), (0.5, 0.5), threshold=1.0)
    shared: dict[str, Any] = {"regrade": identity, "run": "r1"}
    return [
        RegradeStarted(**shared, rollout=rollout_ref()),
        RegradePartGraded(**shared, number=1, artifact=ref("grades"), by_step={1: sums}),
        RegradeCompleted(**shared, status="finished", report=report_of(sums), parts=1),
    ]


async def test_a_regrade_can_be_graded_again_once_it_has_finished(ended: Application) -> None:
    body = {**HALVED, "threshold": 0.5}
    identity = (await ended.post("/runs/first/regrades", body)).json()["regrade"]["id"]
    status, detail = await refused(ended, HALVED, f"regrade:{identity}")
    assert (status, "is waiting" in detail) == (409, True)
    await ended.append(completed(identity))
    found = (await ended.get(f"/regrades/{identity}"))["regrade"]
    assert (found["status"], found["report"]["groups_flattened"]) == ("finished", 1)
    assert found["by_step"]["1"]["reward_after"] == 0.5
    for name in (f"regrade:{identity}", identity):
        again = (await ended.post(f"/runs/{name}/regrades", {"weights": {"grader": 2}})).json()
        assert (again["regrade"]["base"], again["regrade"]["run"]) == (identity, "r1")
        [event] = [
            event
            for event in await ended.recorded("r1", RegradeRequested)
            if isinstance(event, RegradeRequested) and event.regrade == again["regrade"]["id"]
        ]
        assert event.base_weight == 0.5


async def test_a_run_stays_while_a_regrade_of_it_works(ended: Application) -> None:
    made = (await ended.post("/runs/first/regrades", HALVED)).json()["regrade"]
    [request] = await ended.recorded("r1", RegradeRequested)
    assert isinstance(request, RegradeRequested)
    effect = RegradeGroups(
        regrade=made["id"],
        run="r1",
        number=1,
        after="",
        request=request,
        rollout=request.rollout,
    )
    await ended.database.durable.execute(
        "insert into effects (id, consumer, stream, lane, run_id, type, data, correlation)"
        " values ($1, 'regrade', $2, 'user', $3, 'RegradeGroups', $4, $1)",
        effect.id,
        request.stream,
        effect.run_id,
        effect.model_dump_json(),
    )
    for method, path in (("POST", "/runs/first/archive"), ("DELETE", "/runs/first")):
        answer = await ended.api.request(method, f"/api/v1{path}", json={})
        assert answer.status_code == 409, answer.text
        assert "work for it is not finished" in answer.text


async def test_a_regrade_goes_with_its_run(ended: Application) -> None:
    identity = (await ended.post("/runs/first/regrades", HALVED)).json()["regrade"]["id"]
    await ended.append(completed(identity))
    answer = await ended.api.request("DELETE", "/api/v1/runs/first", json={})
    assert answer.status_code == 200, answer.text
    gone = await ended.api.get(f"/api/v1/regrades/{identity}")
    assert gone.status_code == 404
    assert gone.json()["detail"].startswith(f"there is no regrade '{identity}'")


async def test_a_regrade_comes_back_with_its_archived_run(ended: Application) -> None:
    identity = (await ended.post("/runs/first/regrades", HALVED)).json()["regrade"]["id"]
    await ended.append(completed(identity))
    before = (await ended.get(f"/regrades/{identity}"))["regrade"]
    for verb in ("archive", "restore"):
        answer = await ended.post(f"/runs/first/{verb}", {})
        assert answer.status_code == 200, answer.text
    assert (await ended.get(f"/regrades/{identity}"))["regrade"] == before
