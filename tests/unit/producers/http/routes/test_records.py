"""Old records go, and what is still needed stays: streams without their old events fold into the same
state, and the read model is the same when it is made again."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from consumers.deploy.consumer import CONSUMER as DEPLOY
from consumers.project.consumer import Projector
from consumers.status import CONSUMER as STATUS
from infra.blobs.garbage import REMOVED_GRACE, collect
from infra.operations.maintenance.integrity import Inspection, _streams
from infra.operations.maintenance.records import EVALUATIONS, OTHERS
from infra.spine.postgres.pool import administering
from infra.spine.runtime.consumer import AnyConsumer
from infra.spine.runtime.folded_states import StateCache
from schemas.deployments import ServedModel
from schemas.errors import TransientError
from schemas.events import (
    CommitStatusDecided,
    CommitStatusPosted,
    EvaluationCompleted,
    EvaluationRequested,
    EvaluationRetryRequested,
    EvaluationStarted,
    EvaluationStopRequested,
    Event,
    HookPinged,
    HubUploadCancelRequested,
    HubUploaded,
    HubUploadRequested,
    ModelDeployed,
    ModelDeployFailed,
    ModelDeployRequested,
    ModelUndeployed,
    PushReceived,
    VerificationCompleted,
    VerificationRequested,
)
from schemas.ids import StreamName, delivery_stream, eval_stream, model_stream, status_stream
from schemas.specs import CommitStatus
from tests.kit.application import Application
from tests.kit.history import ended_run
from tests.kit.old_events import (
    OldHubPushCancelRequested,
    OldHubPushed,
    OldHubPushRequested,
    old_push,
)
from tests.kit.specs import template
from tests.unit.consumers.deploy.test_deploy import served
from tests.unit.consumers.deploy.test_publish import UPLOAD

pytestmark = pytest.mark.postgres

WS = "w1"
TABLES = ("dead_letters", "evaluations", "hub_uploads", "deliveries", "log_lines", "graded_groups")


def later() -> datetime:
    return datetime.now(UTC) + timedelta(minutes=1)


async def append(app: Application, *events: Event) -> None:
    """Append each event by itself, because two events of one request have one place in a stream."""
    for event in events:
        await app.append([event])


def evaluation(name: str, *, run: str | None = None) -> tuple[Event, ...]:
    """An evaluation that has ended, of one row."""
    asked: dict[str, Any] = {
        "evaluation": name,
        "template": template().model_copy(update={"run": run}),
        "rows": (0,),
        "run": run,
    }
    return (
        EvaluationRequested(eval_name=name, **asked),
        EvaluationStarted(batch_size=8, pass_threshold=1.0, **asked),
        EvaluationCompleted(evaluation=name, run=run, status="finished", reward=1.0, metrics={}),
    )


async def remove(app: Application, *kinds: str) -> dict[str, int]:
    before = later()
    counted = await app.services.records.count(kinds, before=before)
    removed = await app.services.records.remove(kinds, before=before)
    assert removed == counted
    return removed


async def types_in(app: Application, stream: str) -> list[str]:
    name = StreamName(stream)
    return [one.type for one in (await app.services.log.load({name: 0}))[name]]


async def folded(app: Application, stream: str, consumer: AnyConsumer) -> object:
    name = StreamName(stream)
    found = (await StateCache(app.services.log).load({name: consumer}))[name]
    return found.state, found.version


async def stored(app: Application, table: str) -> list[str]:
    found = await app.database.durable.fetch(f"select t::text as t from {table} t order by 1")
    return [row["t"] for row in found]


async def assert_sound(app: Application) -> None:
    """Streams are as `headrace doctor --deep` wants them, and the read model is what the log gives."""
    found = Inspection()
    async with administering(app.database.url) as admin, admin.transaction():
        await _streams(admin, found)
    assert found.damages == []
    before = {table: await stored(app, table) for table in TABLES}
    await Projector(app.services.log, app.services.readmodel).rebuild()
    assert {table: await stored(app, table) for table in TABLES} == before


async def test_an_old_evaluation_goes_with_its_samples_and_its_name(app: Application) -> None:
    await ended_run(app)
    names = app.services.readmodel.names
    for name in ("old", "open", "again"):
        await names.take("evaluation", name, name)
    blob = await app.services.artifacts.put_artifact(b"sample", run="old", blob=True)
    again = EvaluationRetryRequested(evaluation="again", number=1)
    await append(app, *evaluation("old"), *evaluation("open")[:2], *evaluation("again"), again)
    assert await remove(app, EVALUATIONS) == {EVALUATIONS: 1}
    left = (await app.get("/evals"))["evals"]
    assert sorted(one["name"] for one in left) == ["again", "open"]
    assert (await app.api.get("/api/v1/evals/old")).status_code == 404
    assert await types_in(app, eval_stream("old")) == []
    assert await names.find_id("evaluation", "old") is None
    # The validation of a run goes with its run.
    assert len(await types_in(app, eval_stream("r1v"))) == 2
    later_still = later() + REMOVED_GRACE
    for _ in range(2):
        await collect(app.database, app.services.blobs, now=later_still)
    assert await stored(app, "removals") == []
    assert await app.services.blobs.exists(f"runs/old/objects/{blob.sha256}") is None
    await assert_sound(app)
    await append(app, *evaluation("old"))
    assert len((await app.get("/evals"))["evals"]) == 3


async def test_young_records_stay(app: Application) -> None:
    await append(app, *evaluation("young"), HubUploadRequested(upload=UPLOAD), uploaded())
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    kinds = (EVALUATIONS, *OTHERS)
    assert not any((await app.services.records.remove(kinds, before=hour_ago)).values())
    assert not any((await app.services.records.count(kinds, before=hour_ago)).values())


def uploaded() -> HubUploaded:
    return HubUploaded(upload=UPLOAD, url="https://hub/org/sums", revision="c" * 40)


async def test_uploads_to_a_hub_and_verifications_go_when_they_have_ended(app: Application) -> None:
    open_upload = HubUploadRequested(upload=UPLOAD.model_copy(update={"upload": "p2"}))
    checked = VerificationRequested(verification="v1", run="r1")
    done = VerificationCompleted(verification="v1", run="r1", steps=3)
    await append(app, HubUploadRequested(upload=UPLOAD), open_upload, uploaded(), checked, done)
    await append(app, VerificationRequested(verification="v2", run="r1"))
    assert await remove(app, *OTHERS) == {
        **dict.fromkeys(OTHERS, 0),
        "hub_uploads": 1,
        "verifications": 1,
    }
    assert [
        len(await types_in(app, one)) for one in ("hub-p1", "hub-p2", "verify-v1", "verify-v2")
    ] == [
        0,
        1,
        0,
        1,
    ]
    await assert_sound(app)


async def test_a_deleted_run_takes_its_uploads_and_verifications_along(app: Application) -> None:
    await ended_run(app)
    checked = VerificationRequested(verification="v1", run="r1")
    done = VerificationCompleted(verification="v1", run="r1", steps=3)
    await append(
        app, HubUploadRequested(upload=UPLOAD), uploaded(), checked, done, *evaluation("own")
    )
    assert (await app.api.delete("/api/v1/runs/first")).status_code == 200
    assert [await types_in(app, one) for one in ("hub-p1", "verify-v1")] == [[], []]
    assert len(await types_in(app, eval_stream("own"))) == 3
    await assert_sound(app)


async def test_the_newest_delivery_of_a_workspace_stays(app: Application) -> None:
    def received(number: int) -> PushReceived:
        return PushReceived(
            workspace=WS,
            forge="gitea",
            delivery=f"d{number}",
            ref="refs/heads/main",
            before=None,
            after="b" * 40,
        )

    ping = HookPinged(workspace=WS, forge="gitea", delivery="d0")
    await append(app, ping, received(1), received(2))
    assert (await remove(app, "deliveries")) == {"deliveries": 2}
    assert len(await stored(app, "deliveries")) == 1
    await assert_sound(app)
    await append(app, received(3))
    loaded = await app.services.log.load({delivery_stream(WS): 0})
    assert [one.version for one in loaded[delivery_stream(WS)]] == [3, 4]
    assert (await remove(app, "deliveries")) == {"deliveries": 1}
    assert (await remove(app, "deliveries")) == {"deliveries": 0}


async def test_the_newest_status_of_a_commit_stays(app: Application) -> None:
    def decided(number: int) -> CommitStatusDecided:
        status = CommitStatus(
            workspace=WS, sha="b" * 40, context="c", state="pending", text=f"stage {number}"
        )
        return CommitStatusDecided(
            workspace=WS, subject="r1", number=number, stage=number, status=status
        )

    posted = [CommitStatusPosted(workspace=WS, subject="r1", number=n) for n in (1, 2)]
    await append(app, decided(1), posted[0], decided(2), posted[1])
    before = await folded(app, status_stream("r1"), STATUS)
    assert (await remove(app, "statuses")) == {"statuses": 2}
    assert await types_in(app, status_stream("r1")) == [decided(2).type, posted[1].type]
    assert await folded(app, status_stream("r1"), STATUS) == before
    await assert_sound(app)


def asked(name: str, request: str) -> ModelDeployRequested:
    return ModelDeployRequested(deployment=name, request=request, served=model(name))


def model(name: str) -> ServedModel:
    return served(3, name=name)


async def test_served_models_and_the_newest_of_each_name_stay(app: Application) -> None:
    def deployed(name: str, request: str, number: int) -> ModelDeployed:
        return ModelDeployed(deployment=name, request=request, served=model(name), number=number)

    await append(app, asked("a", "q1"), deployed("a", "q1", 1), asked("b", "q2"))
    await append(app, deployed("b", "q2", 2), asked("a", "q3"), deployed("a", "q3", 3))
    await append(app, ModelUndeployed(deployment="b", request="q4"), asked("c", "q5"))
    await append(
        app, asked("a", "q6"), ModelDeployFailed(deployment="a", request="q6", message="x")
    )
    before = await folded(app, model_stream(), DEPLOY)
    rows = await app.database.durable.fetch(
        "select deployment, status, number, served, pending, error from deployments order by 1"
    )
    assert (await remove(app, "deployments"))["deployments"] == 3
    assert await folded(app, model_stream(), DEPLOY) == before
    await assert_sound(app)
    assert rows == await app.database.durable.fetch(
        "select deployment, status, number, served, pending, error from deployments order by 1"
    )
    await append(app, deployed("c", "q5", 4))
    assert (await app.get("/deployments"))["deployments"]


async def test_nothing_goes_that_a_consumer_has_not_read(app: Application) -> None:
    await append(app, *evaluation("old"))
    await app.database.durable.execute("insert into watermarks values ('slow', '0', 0)")
    with pytest.raises(TransientError, match="consumer slow has not read"):
        await app.services.records.remove((EVALUATIONS,), before=later())
    assert len(await types_in(app, eval_stream("old"))) == 3


async def test_an_evaluation_with_unfinished_work_stays(app: Application) -> None:
    await append(app, *evaluation("old"))
    await app.database.durable.execute(
        "insert into effects (id, consumer, stream, lane, run_id, type, data, correlation)"
        " values ($1, 'rollout', 's', 'generate', 'old', 't', '{}', $1)",
        uuid4(),
    )
    assert await remove(app, EVALUATIONS) == {EVALUATIONS: 0}


async def test_a_request_to_stop_that_came_too_late_keeps_nothing(app: Application) -> None:
    names = app.services.readmodel.names
    for name in ("one", "two"):
        await names.take("evaluation", name, name)
        await append(app, *evaluation(name), EvaluationStopRequested(evaluation=name))
    await append(
        app, HubUploadRequested(upload=UPLOAD), uploaded(), HubUploadCancelRequested(upload=UPLOAD)
    )
    assert (await app.api.delete("/api/v1/evals/one")).json() == {"deleted": "one"}
    assert await remove(app, EVALUATIONS, "hub_uploads") == {EVALUATIONS: 1, "hub_uploads": 1}
    await assert_sound(app)


async def test_an_upload_of_an_earlier_release_goes_like_another_one(app: Application) -> None:
    push = old_push(UPLOAD)
    await append(
        app,
        OldHubPushRequested(push=push),
        OldHubPushed(push=push, url="https://hub/org/sums", revision="c" * 40),
        OldHubPushCancelRequested(push=push),
    )
    assert await app.recorded("p1") == [
        HubUploadRequested(upload=UPLOAD),
        uploaded(),
        HubUploadCancelRequested(upload=UPLOAD),
    ]
    [row] = await app.services.readmodel.hub_uploads.of("r1")
    assert (row["status"], row["url"]) == ("uploaded", "https://hub/org/sums")
    assert len(await stored(app, "log_lines")) == 2
    await assert_sound(app)
    assert await remove(app, "hub_uploads") == {"hub_uploads": 1}
    assert await stored(app, "log_lines") == []
    assert await app.recorded("p1") == []


async def test_evaluations_are_deleted_by_request_and_counted_for_gc(app: Application) -> None:
    names = app.services.readmodel.names
    for name in ("one", "two", "open"):
        await names.take("evaluation", name, name)
    await append(app, *evaluation("one"), *evaluation("two"), *evaluation("open")[:2])
    refused = await app.api.delete("/api/v1/evals/open")
    assert refused.status_code == 409
    assert "headrace eval stop open" in refused.json()["detail"]
    assert (await app.api.delete("/api/v1/evals/one")).json() == {"deleted": "one"}
    assert (await app.api.delete("/api/v1/evals/one")).status_code == 404
    assert (await app.get("/gc", older_than_s=0))["records"]["evaluations"] == 1
    kept = (await app.post("/gc", {"older_than_s": 0})).json()["records"]
    assert "evaluations" not in kept
    gone = await app.post("/gc", {"older_than_s": 0, "evaluations": True})
    assert gone.json()["records"]["evaluations"] == 1
    assert [one["name"] for one in (await app.get("/evals"))["evals"]] == ["open"]
    await assert_sound(app)
