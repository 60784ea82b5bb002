"""Forks over the API: where they begin, what they keep of their parent, what is refused, and what a
parent with forks may not do."""

from typing import Any
from uuid import uuid4

import pytest

from schemas.costs.work import Work
from schemas.events import PolicyUpdated, RunRequested, StepSettled
from schemas.ids import policy_stream, run_stream
from tests.kit.application import Application, rows
from tests.kit.history import ended_run
from tests.kit.pushes import origin
from tests.kit.story import whole_run

pytestmark = pytest.mark.postgres

LONGER = {"advanced.max_steps": 9}


@pytest.fixture
async def ended(app: Application) -> Application:
    """A finished run `first` of three steps, whose dataset exists."""
    await app.upload("sums", rows(64))
    await ended_run(app)
    return app


async def ask(app: Application, at: str, run: str = "first", **more: Any) -> Any:
    body = {"at": at, "set": LONGER, **more}
    return await app.post(f"/runs/{run}/fork", body, idempotency_key=uuid4().hex)


async def forked(app: Application, at: str, run: str = "first", **more: Any) -> Any:
    answer = await ask(app, at, run, **more)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def refused(app: Application, at: str, run: str = "first", **more: Any) -> tuple[int, str]:
    answer = await ask(app, at, run, **more)
    return answer.status_code, answer.json().get("detail", "")


async def requested(app: Application, run: str) -> RunRequested:
    [event] = await app.recorded(run, RunRequested)
    assert isinstance(event, RunRequested)
    return event


async def test_a_fork_begins_right_after_its_step_with_what_its_parent_pinned(
    ended: Application,
) -> None:
    made = await forked(ended, "2", set={**LONGER, "training.lr": 1e-5})
    child, parent = await requested(ended, made["run"]["id"]), await requested(ended, "r1")
    assert child.fork is not None
    settled, updated = [
        (await ended.services.log.events_at([place]))[0].event
        for place in (
            (run_stream("r1"), child.fork.position),
            (policy_stream(child.fork.parent), child.fork.policy_position),
        )
    ]
    assert (settled.type, settled.step) == ("rl.step.settled", 2)  # type: ignore[attr-defined]  # it has a step
    assert (updated.type, updated.step) == ("rl.policy.updated", 2)  # type: ignore[attr-defined]  # it has a step
    assert (child.dataset, child.model, child.date) == (parent.dataset, parent.model, parent.date)
    assert child.config.experiment.commit_sha == "c" * 40
    assert made["run"]["name"] == "first-fork-1"
    assert (made["run"]["parent_name"], made["run"]["parent_step"]) == ("first", 2)
    changes = {one["key"]: one["from_step"] for one in made["fork"]["changes"]}
    assert changes == {"advanced.max_steps": 3, "training.lr": 3}


async def test_a_fork_at_an_event_begins_after_the_step_that_was_settled_then(
    ended: Application,
) -> None:
    events = (await ended.get("/runs/first/events", limit=1000))["events"]
    assembled = next(
        e for e in events if e["type"] == "rl.batch.assembled" and e["data"]["step"] == 3
    )
    for at in (assembled["id"], assembled["cursor"]):
        assert (await forked(ended, at))["fork"]["step"] == 2


async def test_a_place_that_is_not_there_is_refused_with_those_that_are(ended: Application) -> None:
    await ended_run(ended, "r2", "second")
    other = (await ended.get("/runs/second/events", limit=5))["events"][0]
    assert await refused(ended, "4") == (
        409,
        "run first has no step 4: it has steps 0 to 3; fork it at one of these",
    )
    for at in ("-1", "last", "1.5"):
        status, detail = await refused(ended, at)
        assert status == 400
        assert "must be a step from 0, or an event's id or cursor" in detail
    for at in (other["id"], other["cursor"], str(uuid4())):
        status, detail = await refused(ended, at)
        assert status == 404
        assert f"run first has no event {at}" in detail
    assert (await refused(ended, "3", set={"advanced.max_steps": 3}))[0] == 400
    assert (await refused(ended, "1", run="nobody"))[0] == 404


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("experiment.model_path", "scratch:qwen3-2m"),
        ("advanced.lora_rank", 4),
        ("advanced.tuning", "full"),
        ("advanced.optimizer", "muon"),
        ("advanced.algorithm", "ppo"),
    ],
)
async def test_a_key_that_the_state_follows_from_cannot_change(
    ended: Application, key: str, value: object
) -> None:
    answer = await ask(ended, "2", set={**LONGER, key: value})
    assert answer.status_code == 400, answer.text
    assert key in {issue["key"] for issue in answer.json()["issues"]}
    assert "fork" in answer.json()["detail"]


async def test_the_same_key_makes_the_same_fork_and_numbers_go_on(ended: Application) -> None:
    body, key = {"at": "1", "set": LONGER}, uuid4().hex
    twice = [
        (await ended.post("/runs/first/fork", body, idempotency_key=key)).json()["run"]["id"]
        for _ in range(2)
    ]
    assert twice[0] == twice[1]
    other = await ended.post("/runs/first/fork", {**body, "at": "2"}, idempotency_key=key)
    assert other.status_code == 409
    assert (await forked(ended, "1"))["run"]["name"] == "first-fork-2"
    page = await ended.get("/runs/first/forks", limit=1)
    assert [run["name"] for run in page["runs"]] == ["first-fork-1"]
    assert page["total_count" if "total_count" in page else "total"] == 2


async def test_a_dry_run_makes_nothing(ended: Application) -> None:
    answer = await ended.post("/runs/first/fork", {"at": "1", "set": LONGER, "dry_run": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["fork"]["notes"]
    assert (await ended.get("/runs/first/forks"))["runs"] == []


async def test_an_estimate_shares_what_a_fork_cost_among_the_steps_of_its_own(
    ended: Application,
) -> None:
    """The steps before the fork were paid by the parent. They were counted, so an estimate from a fork
    of step 2 after its third step was a third of what that step took."""
    child = (await forked(ended, "2"))["run"]["id"]
    work = Work(effect="TrainStep", device="cpu", device_s=60.0)
    story = [one for one in whole_run(child, "any", steps=3) if getattr(one, "step", 0) == 3]
    for event in story:
        if isinstance(event, PolicyUpdated):
            await ended.services.log.append(
                [event.model_copy(update={"work": work})], cause=uuid4()
            )
        elif isinstance(event, StepSettled):
            await ended.services.log.append([event], cause=uuid4())
    await ended.services.readmodel.caught_up(await ended.services.log.visible_head())
    answer = await ask(ended, "2", dry_run=True)
    past = answer.json()["estimates"]["past"]
    assert past["runs"] == ["first-fork-1"]
    assert past["step_s"] == {"cpu": 60.0}


async def test_a_run_with_forks_is_neither_deleted_nor_archived(
    ended: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    await forked(ended, "2")
    deleted = await ended.api.delete("/api/v1/runs/first")
    archived = await ended.post("/runs/first/archive", {})
    assert (deleted.status_code, archived.status_code) == (409, 409)
    assert "these are forks of it: first-fork-1" in deleted.json()["detail"]
    assert (
        "the states of its forks begin with its history: first-fork-1" in archived.json()["detail"]
    )

    async def nobody(*_: object, **__: object) -> list[str]:
        return []

    # The twin: without the look at forks, both are done.
    monkeypatch.setattr(ended.services.retention._holders, "forks_of", nobody)
    assert (await ended.post("/runs/first/archive", {})).status_code == 200
    assert (await refused(ended, "1"))[0] == 409
    assert (await ended.api.delete("/api/v1/runs/first")).status_code == 200
    assert (await refused(ended, "1"))[0] == 404


async def test_an_evaluation_cannot_be_forked(ended: Application) -> None:
    status, detail = await refused(ended, "1", run="r1v0")
    assert status in (400, 404)
    assert "r1v0" in detail


async def test_a_fork_of_a_pushed_run_takes_no_personal_secrets_to_code_that_nobody_named(
    ended: Application,
) -> None:
    await ended_run(ended, "r2", "pushed", origin=origin())
    own = await requested(ended, (await forked(ended, "2"))["run"]["id"])
    assert own.submitter is not None
    child = await requested(ended, (await forked(ended, "2", "pushed"))["run"]["id"])
    assert (child.submitter, child.creator) == (None, own.creator)
    named = await forked(ended, "2", "pushed", commit="d" * 40)
    assert (await requested(ended, named["run"]["id"])).submitter == own.submitter


async def test_a_fork_that_has_settled_no_step_shares_the_steps_before_it(
    ended: Application,
) -> None:
    made = await forked(ended, "2")
    for pair in (("first", made["run"]["name"]), (made["run"]["name"], "first")):
        found = (await ended.get(f"/runs/{pair[0]}/diff/{pair[1]}"))["diff"]
        assert found["ancestor"] == {"id": "r1", "name": "first", "step": 2}
        assert found["first_other_step"] is None
