"""Archive, restore, delete and rename: what stays, what is removed, what is refused, and the result
of a rebuild."""

import asyncio
import gzip
import json
import tarfile
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import asyncpg
import pytest

from consumers.project.consumer import Projector
from infra.blobs import garbage, references
from infra.blobs.artifacts import reference
from infra.blobs.garbage import GRACE, REMOVED_GRACE, collect
from infra.operations.maintenance.archive import Archives, Moved
from infra.operations.maintenance.archive_file import members
from infra.operations.maintenance.integrity import Inspection, _events, _Recorded, _rows, _streams
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.pool import administering
from infra.spine.postgres.restored_dump import repair
from schemas.costs.work import Work
from schemas.deployments import deployment_id, deployment_key
from schemas.errors import CorruptData
from schemas.events import (
    EvaluationRequested,
    ModelDeployed,
    ModelDeployRequested,
    ModelUndeployed,
    PolicyUpdated,
    RunArchived,
    RunDeleted,
    RunRequested,
    RunStopped,
    VerificationCompleted,
)
from schemas.ids import ConsumerName, StreamName
from schemas.models.reward_model import RewardModelSpec
from schemas.sampling import ModelRef
from tests.kit.application import Application, rows
from tests.kit.history import ended_run, keep, named_by_checkpoint
from tests.kit.specs import DATASET, MODEL, ref, template, version
from tests.kit.story import WORKSPACE, batch_of, beginning, whole_run

pytestmark = pytest.mark.postgres

LATER = GRACE + REMOVED_GRACE + timedelta(minutes=5)


@pytest.fixture
async def ended(app: Application) -> Application:
    await ended_run(app)
    return app


async def views(app: Application, run: str = "first") -> dict[str, Any]:
    """Everything that the API shows of a run."""
    samples = await app.get(f"/runs/{run}/samples", limit=100)
    sample = samples["samples"][0]["id"]
    shown = {
        "info": await app.get(f"/runs/{run}"),
        "samples": samples,
        "logs": await app.get(f"/runs/{run}/logs", limit=1000),
        "events": await app.get(f"/runs/{run}/events", limit=1000),
        "trace": await app.get(f"/runs/{run}/trace", sample=sample),
        "evaluations": await stored(app, "evaluations"),
        "groups": await stored(app, "graded_groups"),
    }
    return json.loads(json.dumps(shown))


async def stored(app: Application, table: str) -> list[str]:
    found = await app.database.durable.fetch(f"select t::text as t from {table} t order by 1")
    return [row["t"] for row in found]


async def count(app: Application, table: str) -> int:
    return int(await app.database.durable.fetchval(f"select count(*) from {table}"))


async def archived(app: Application, ref: str = "first") -> Any:
    answer = await app.post(f"/runs/{ref}/archive", {})
    assert answer.status_code == 200, answer.text
    return answer.json()["run"]


async def restored(app: Application, ref: str = "first") -> Any:
    answer = await app.post(f"/runs/{ref}/restore", {})
    assert answer.status_code == 200, answer.text
    return answer.json()["run"]


async def deleted(app: Application, path: str) -> Any:
    return await app.api.delete(f"/api/v1{path}")


async def sound(app: Application) -> Inspection:
    """Check that streams, events and rows agree, as `headrace doctor --deep` would."""
    found, told = Inspection(), _Recorded()
    async with administering(app.database.url) as admin, admin.transaction():
        await _streams(admin, found)
        await _events(admin, told, found)
        await _rows(admin, told.rows, found)
    assert found.damages == []
    return found


async def test_an_archived_run_is_listed_apart_and_keeps_its_checkpoints(
    ended: Application,
) -> None:
    before = await count(ended, "events")
    run = await archived(ended)
    assert run["status"] == "finished"
    assert run["archived_at"]
    assert (await ended.get("/runs"))["runs"] == []
    [listed] = (await ended.get("/runs", archived="true"))["runs"]
    assert (listed["name"], listed["current_step"], listed["reward"]) == ("first", 3, 0.3)
    info = await ended.get("/runs/first")
    assert [c["ref"] for c in info["checkpoints"]] == ["first@3"]
    assert (await ended.services.lookup.checkpoint("first@last")).spec.step == 3
    types = [e["type"] for e in (await ended.get("/runs/first/events"))["events"]]
    assert sorted(types) == ["rl.checkpoint.saved", "rl.run.archived", "rl.run.requested"]
    assert await count(ended, "events") < before / 3
    for table in ("metric_points", "graded_groups", "evaluations"):
        assert await count(ended, table) == 0
    for view in ("samples", "logs", "metrics", "trace?sample=r1-train-1-0-0.0"):
        answer = await ended.api.get(f"/api/v1/runs/first/{view}")
        assert answer.status_code == 409
        assert "headrace train restore first" in answer.json()["detail"]
    for verb in ("stop", "pause", "verify", "rename"):
        body = {"name": "x"} if verb == "rename" else {}
        assert (await ended.post(f"/runs/first/{verb}", body)).status_code == 409
    await sound(ended)


async def test_an_archived_run_keeps_its_costs_and_a_rebuild_finds_them(ended: Application) -> None:
    """Also those of its verification, whose events stay in the log."""
    verification = (await ended.post("/runs/first/verify", {})).json()["verification"]["id"]
    work = Work(effect="VerifyRun", device="cpu", device_s=3.0)
    done = VerificationCompleted(verification=verification, run="r1", work=work)
    await ended.append([done])
    before = (await ended.get("/cost"))["total"]
    assert before["effects"]["VerifyRun"] == 3.0
    assert before["tokens_sampled"] > 0
    await archived(ended)
    shown, rows = (await ended.get("/cost"))["total"], await stored(ended, "costs")
    assert {**shown, "stored_bytes": 0} == {**before, "stored_bytes": 0}
    await Projector(ended.services.log, ended.services.readmodel).rebuild()
    assert await stored(ended, "costs") == rows
    await restored(ended)
    assert (await ended.get("/cost"))["total"] == before


async def test_a_restored_run_shows_what_it_showed(ended: Application) -> None:
    before = await views(ended)
    await archived(ended)
    await collect(ended.database, ended.services.blobs, now=ended.services.clock.now() + LATER)
    run = await restored(ended)
    assert run["archived_at"] is None
    after = await views(ended)
    [*events, last] = after["events"].pop("events")
    assert events == before["events"].pop("events")
    assert last["type"] == "rl.run.restored"
    after["events"].pop("next"), before["events"].pop("next")
    assert after == before
    await sound(ended)
    again = await ended.post("/runs/first/restore", {})
    assert again.status_code == 409
    assert "not archived" in again.json()["detail"]


async def test_it_can_be_archived_and_restored_again(ended: Application) -> None:
    before = await views(ended)
    for _ in range(2):
        await archived(ended)
        await archived(ended)
        await restored(ended)
    after = await views(ended)
    for view in ("info", "samples", "logs", "trace", "evaluations", "groups"):
        assert after[view] == before[view]


async def test_a_rebuild_lists_archived_runs_and_does_not_resurrect_deleted_ones(
    ended: Application,
) -> None:
    await ended_run(ended, "r2", "second")
    await ended_run(ended, "r3", "third")
    await archived(ended, "second")
    assert (await deleted(ended, "/runs/third")).status_code == 200
    tables = ("runs", "checkpoints", "metric_points", "graded_groups", "log_lines", "evaluations")
    before = {table: await stored(ended, table) for table in tables}
    await ended.projector.rebuild()
    assert {table: await stored(ended, table) for table in tables} == before
    await restored(ended, "second")
    before = {table: await stored(ended, table) for table in tables}
    await ended.projector.rebuild()
    after = {table: await stored(ended, table) for table in tables}
    assert after == before
    assert [run["name"] for run in (await ended.get("/runs"))["runs"]] == ["second", "first"]


async def test_bytes_of_an_archived_run_are_collected_and_checkpoints_stay(
    ended: Application,
) -> None:
    sample = ref_of(batch_of("r1-train-1-0-0"))
    shared = await keep(ended, b"a row that another run names as well")
    await archived(ended)
    now = ended.services.clock.now()
    blobs = ended.services.blobs
    assert await collect(ended.database, blobs, now=now) == 0, "a request may be under way"
    assert await collect(ended.database, blobs, now=now + LATER) > 0
    assert await ended.services.log.artifact(sample) is None
    assert await ended.services.log.artifact(named_by_checkpoint().sha256) == b"{}"
    assert await ended.services.log.artifact(shared.sha256) is not None
    left = [blob.key for blob in await blobs.keys("runs/r1/")]
    assert len([key for key in left if "/archives/" in key]) == 1
    manifest = (await ended.get("/runs/first"))["checkpoints"][0]["uri"]
    assert await blobs.get_blob(manifest) == b'"manifest of r1"'
    assert len(left) == 2, "the weights of step 2 are in the archive"
    await sound(ended)


def ref_of(data: bytes) -> str:
    return reference(data).sha256


async def test_rows_of_an_archived_run_stay_while_another_names_them(ended: Application) -> None:
    """The small artifacts of the kit are the same in both runs."""
    await ended_run(ended, "r2", "second")
    await archived(ended, "second")
    now = ended.services.clock.now() + LATER
    await collect(ended.database, ended.services.blobs, now=now)
    await sound(ended)
    assert (await ended.get("/runs/first/samples"))["total_count"] > 0


async def test_an_artifact_named_again_before_it_is_collected_stays(ended: Application) -> None:
    sample = batch_of("r1-train-1-0-0")
    await archived(ended)
    event = next(e for e in beginning("r9", "ninth", steps=1) if isinstance(e, RunRequested))
    dataset = DATASET.model_copy(update={"content": ref(sample.decode())})
    await ended.append([event.model_copy(update={"dataset": dataset})])
    now = ended.services.clock.now() + LATER
    await collect(ended.database, ended.services.blobs, now=now)
    assert await ended.services.log.artifact(ref_of(sample)) == sample


@pytest.mark.parametrize("looks_late", [True, False])
async def test_an_artifact_that_is_named_while_others_are_collected_stays(
    ended: Application, monkeypatch: pytest.MonkeyPatch, looks_late: bool
) -> None:
    """The twin: if the names are those of a moment before, the artifact is removed."""
    sample = batch_of("r1-train-1-0-0")
    await archived(ended)
    delete, look = garbage._delete_rows, references.named_uris

    async def named_just_before(*arguments: Any) -> int:
        state = version(1).model_copy(update={"weights": reference(sample), "state": None})
        update = next(e for e in whole_run("r9", "ninth", steps=1) if isinstance(e, PolicyUpdated))
        await ended.append([update.model_copy(update={"state": state})])
        return await delete(*arguments)

    async def look_before(connection: Any, uris: list[str]) -> set[str]:
        return await look(connection, uris) - {reference(sample).uri}

    monkeypatch.setattr(garbage, "_delete_rows", named_just_before)
    if not looks_late:
        monkeypatch.setattr(garbage, "named_uris", look_before)
    now = ended.services.clock.now() + LATER
    await collect(ended.database, ended.services.blobs, now=now)
    found = await ended.services.log.artifact(ref_of(sample))
    assert (found == sample) is looks_late


async def test_twin_without_the_names_what_others_need_is_collected(
    ended: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object) -> set[str]:
        return set()

    await archived(ended)
    monkeypatch.setattr(garbage, "named_uris", nothing)
    now = ended.services.clock.now() + LATER
    await collect(ended.database, ended.services.blobs, now=now)
    assert await ended.services.log.artifact(ref("tree").sha256) is None


async def test_an_archive_that_the_store_did_not_keep_removes_nothing(
    ended: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, before = ended.services.blobs, await views(ended)
    put = blobs.put_file

    async def torn(key: str, path: Path) -> str:
        path.write_bytes(path.read_bytes()[:-1])
        return await put(key, path)

    monkeypatch.setattr(blobs, "put_file", torn)
    answer = await ended.post("/runs/first/archive", {})
    assert answer.status_code == 500
    assert "does not hold the archive" in answer.json()["detail"]
    assert await views(ended) == before


async def test_twin_without_turns_a_rebuild_shows_rows_of_archived_runs(
    ended: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that a dataset gave free is registered again: forgotten after it was put, in one batch."""
    (await ended.upload("others", rows(5))).raise_for_status()
    assert (await deleted(ended, "/datasets/others")).status_code == 200
    (await ended.upload("others", rows(6))).raise_for_status()
    before = await stored(ended, "datasets")
    await ended.projector.rebuild()
    assert await stored(ended, "datasets") == before
    monkeypatch.setattr(
        "consumers.project.consumer._until_turn", lambda events, after: (events, after)
    )
    await ended.projector.rebuild()
    assert await stored(ended, "datasets") != before


async def test_two_archivers_at_once_make_one_archive(ended: Application) -> None:
    answers = await asyncio.gather(*(ended.post("/runs/first/archive", {}) for _ in range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    types = [e["type"] for e in (await ended.get("/runs/first/events"))["events"]]
    assert types.count("rl.run.archived") == 1
    answers = await asyncio.gather(*(ended.post("/runs/first/restore", {}) for _ in range(3)))
    assert {answer.status_code for answer in answers} <= {200, 409}
    await views(ended)
    await sound(ended)


async def test_only_what_has_ended_can_be_archived_or_deleted(app: Application) -> None:
    for event in beginning("r1", "first", steps=2):
        await app.append([event])
    await app.services.readmodel.names.take("run", "first", "r1")
    for answer in (
        await app.post("/runs/first/archive", {}),
        await deleted(app, "/runs/first"),
    ):
        assert answer.status_code == 409
        assert "run first is running" in answer.json()["detail"]


async def no_look_before(_: Archives, __: str) -> None:
    """Skip the check whether a consumer is behind."""


@pytest.mark.parametrize("looks_before", [True, False])
async def test_nothing_is_removed_that_a_consumer_has_not_read(
    ended: Application, monkeypatch: pytest.MonkeyPatch, looks_before: bool
) -> None:
    """The earlier check only saves work; the check inside the transaction decides."""
    monkeypatch.setattr("infra.operations.maintenance.archive.PATIENCE_S", 0.3)
    if not looks_before:
        monkeypatch.setattr(Archives, "_until_read", no_look_before)
    await ended.services.log.advance([ConsumerName("learn")], Cursor(1, 1))
    answer = await ended.post("/runs/first/archive", {})
    assert answer.status_code == 503
    assert "consumer learn has not read" in answer.json()["detail"]
    kept = [blob.key for blob in await ended.services.blobs.keys("runs/r1/")]
    assert any("/archives/" in key for key in kept) is not looks_before
    await ended.services.log.advance(
        [ConsumerName("learn")], await ended.services.log.visible_head()
    )
    await archived(ended)


async def test_twin_without_the_watermarks_events_go_that_nobody_has_read(
    ended: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Archives, "_until_read", no_look_before)
    await ended.services.log.advance([ConsumerName("learn")], Cursor(1, 1))
    async with administering(ended.database.url) as admin:
        await admin.execute(
            "create or replace function begin_removal(p_xid xid8, p_position bigint) returns void"
            " language sql as $$"
            " select set_config('headrace.removes', pg_current_xact_id()::text, true) $$"
        )
    await archived(ended)
    assert await ended.services.log.watermark(ConsumerName("learn")) == Cursor(1, 1)


async def test_work_for_a_run_keeps_it(ended: Application) -> None:
    await ended.database.durable.execute(
        "insert into effects (id, consumer, stream, lane, run_id, type, data, correlation)"
        " values ($1, 'verify', 'verify-v', 'train', 'v', 'VerifyRun',"
        ' \'{"verification": "v", "run": "r1"}\', $1)',
        uuid4(),
    )
    answer = await ended.post("/runs/first/archive", {})
    assert answer.status_code == 409
    assert "work for it is not finished" in answer.json()["detail"]


async def test_a_deleted_run_is_gone_and_its_name_is_free(ended: Application) -> None:
    await archived(ended)
    assert (await deleted(ended, "/runs/first")).status_code == 200
    assert (await ended.api.get("/api/v1/runs/first")).status_code == 404
    assert (await ended.api.get("/api/v1/runs/r1")).status_code == 404
    assert (
        await ended.services.readmodel.names.take("run", "first", "another", scope=WORKSPACE)
        == "another"
    )
    assert (await deleted(ended, "/runs/r1")).status_code == 404
    now = ended.services.clock.now() + LATER
    await collect(ended.database, ended.services.blobs, now=now)
    assert await ended.services.blobs.keys("runs/r1") == []
    await sound(ended)
    [event] = (await ended.services.log.load({RunDeleted(run="r1").stream: 0}))[
        StreamName("run-r1")
    ]
    assert (event.version, event.type) == (1, "rl.run.deleted")


CHILD = ModelRef(kind="checkpoint", name="r1@3", files={"adapter_config.json": ref("{}")})
JUDGE = RewardModelSpec(
    name="judge", checkpoint="r9@3", base=CHILD, weights=ref("{}"), lora_alpha=1.0
)


async def started_with(app: Application, **changes: object) -> None:
    """A run with these fields of its request, and its name."""
    event = next(e for e in beginning("r7", "child", steps=1) if isinstance(e, RunRequested))
    await app.services.readmodel.names.take("run", "child", "r7")
    await app.append([event.model_copy(update=changes)])


@pytest.mark.parametrize(
    "changes",
    [
        {"model": CHILD},
        {"reward_models": (JUDGE,)},
        {
            "reward_models": (
                JUDGE.model_copy(
                    update={"checkpoint": "r1@3", "base": ModelRef(kind="hub", name="m")}
                ),
            )
        },
    ],
    ids=["start", "base of a reward model", "reward model"],
)
async def test_a_run_that_another_needs_is_not_deleted_but_archived(
    ended: Application, changes: dict[str, object]
) -> None:
    await started_with(ended, **changes)
    answer = await deleted(ended, "/runs/first")
    assert answer.status_code == 409
    assert "need its checkpoints: child" in answer.json()["detail"]
    await archived(ended)
    now = ended.services.clock.now() + LATER
    await collect(ended.database, ended.services.blobs, now=now)
    model = (await ended.services.lookup.checkpoint("first@last")).model()
    for file in model.files.values():
        await ended.services.artifacts.get_artifact(file, cached=False)


async def test_a_run_whose_checkpoint_is_measured_is_not_deleted(ended: Application) -> None:
    model = ModelRef(kind="checkpoint", name="r1@3")
    asked = EvaluationRequested(
        evaluation="e1",
        eval_name="measure",
        template=template().model_copy(update={"model": model, "run": None}),
        rows=(0,),
    )
    await ended.services.readmodel.names.take("evaluation", "measure", "e1")
    await ended.append([asked])
    answer = await deleted(ended, "/runs/first")
    assert answer.status_code == 409
    assert "measure its checkpoints: measure" in answer.json()["detail"]


async def test_a_run_whose_checkpoint_is_served_or_being_loaded_is_not_deleted(
    ended: Application,
) -> None:
    asked = {"checkpoint": "first@last", "name": "sums"}
    assert (await ended.post("/deployments", asked)).status_code == 202
    run = await ended.services.lookup.run("first")
    key = deployment_key("sums", run.owner_workspace)
    [request] = await ended.recorded(deployment_id(key), ModelDeployRequested)
    assert isinstance(request, ModelDeployRequested)
    deployed = ModelDeployed(
        deployment="sums", request=request.request, served=request.served, number=1
    )
    for more in (None, deployed):
        if more is not None:
            await ended.append([more])
        answer = await deleted(ended, "/runs/first")
        assert answer.status_code == 409, answer.text
        assert "serve its checkpoints: sums" in answer.json()["detail"]
    await ended.append([ModelUndeployed(deployment="sums", request="e1")])
    assert (await deleted(ended, "/runs/first")).status_code == 200


async def test_a_run_is_renamed_and_its_former_name_is_free(ended: Application) -> None:
    await ended_run(ended, "r2", "second")
    refused = await ended.post("/runs/first/rename", {"name": "second"})
    assert refused.status_code == 409
    assert (await ended.post("/runs/first/rename", {"name": "a b\n"})).status_code == 400
    answer = await ended.post("/runs/first/rename", {"name": "better"})
    assert (answer.status_code, answer.json()["run"]["name"]) == (200, "better")
    assert answer.json()["run"]["id"] == "r1"
    assert (await ended.api.get("/api/v1/runs/first")).status_code == 404
    assert (await ended.services.lookup.checkpoint("better@last")).ref == "better@3"
    assert (
        await ended.services.readmodel.names.take("run", "first", "another", scope=WORKSPACE)
        == "another"
    )
    await archived(ended, "better")
    assert (await ended.services.lookup.run("better")).run_name == "better"
    await ended.projector.rebuild()
    await restored(ended, "better")
    assert (await ended.get("/runs/better"))["run"]["name"] == "better"
    await sound(ended)


async def test_a_dataset_is_deleted_unless_something_needs_it(app: Application) -> None:
    made = (await app.upload("numbers", rows(4))).json()["dataset"]
    await keep(app, b"rows")
    event = next(e for e in beginning("r1", "first", steps=1) if isinstance(e, RunRequested))
    dataset = DATASET.model_copy(update={"dataset": made["id"]})
    await app.services.readmodel.names.take("run", "first", "r1")
    await app.append([event.model_copy(update={"dataset": dataset})])
    refused = await deleted(app, "/datasets/numbers")
    assert refused.status_code == 409
    assert "learn from it or are validated on it: first" in refused.json()["detail"]

    (await app.upload("others", rows(5))).raise_for_status()
    assert (await deleted(app, "/datasets/others")).status_code == 200
    assert (await app.api.get("/api/v1/datasets/others")).status_code == 404
    assert [d["name"] for d in (await app.get("/datasets"))["datasets"]] == ["numbers"]
    now = app.services.clock.now() + LATER
    await collect(app.database, app.services.blobs, now=now)
    assert len(await app.services.blobs.keys("datasets/")) == 2, "the two forms of numbers"

    again = await app.upload("others", rows(6))
    assert again.status_code == 200, again.text
    assert again.json()["dataset"]["num_rows"] == 6
    await app.projector.rebuild()
    assert {d["name"]: d["num_rows"] for d in (await app.get("/datasets"))["datasets"]} == {
        "numbers": 4,
        "others": 6,
    }
    await sound(app)


async def test_content_that_is_uploaded_again_is_not_collected(app: Application) -> None:
    (await app.upload("one", rows(5))).raise_for_status()
    (await app.upload("two", rows(5))).raise_for_status()
    assert (await deleted(app, "/datasets/one")).status_code == 200
    now = app.services.clock.now() + LATER
    await collect(app.database, app.services.blobs, now=now)
    assert (await app.get("/datasets/two/preview"))["rows"]


async def test_a_rejected_upload_can_be_removed(app: Application) -> None:
    assert (await app.upload("bad", "not json\n")).status_code == 400
    assert [d["status"] for d in (await app.get("/datasets"))["datasets"]] == ["error"]
    assert (await deleted(app, "/datasets/bad")).status_code == 200
    assert (await app.get("/datasets"))["datasets"] == []


async def test_a_restore_that_lost_its_lock_restores_nothing(
    ended: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector may have deleted the blobs that it put back."""
    await archived(ended)
    insert = Archives._insert

    async def insert_without_lock(self: Archives, *args: Any) -> Cursor:
        admin = await asyncpg.connect(ended.database.url)
        await admin.fetch(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'headrace lock' and datname = current_database()"
        )
        await admin.close()
        return await insert(self, *args)

    monkeypatch.setattr(Archives, "_insert", insert_without_lock)
    assert (await ended.post("/runs/first/restore", {})).status_code == 503
    monkeypatch.undo()
    assert (await restored(ended))["archived_at"] is None


async def test_a_damaged_archive_restores_nothing(ended: Application) -> None:
    await archived(ended)
    notice = await ended.services.retention._notice("r1")
    assert notice is not None
    path = Path(unquote(urlsplit(notice.archive.uri).path))
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    answer = await ended.post("/runs/first/restore", {})
    assert answer.status_code == 500
    assert "does not hold the archive" in answer.json()["detail"]
    path.write_bytes(whole)
    await restored(ended)
    await sound(ended)


async def test_a_run_with_a_damaged_artifact_is_not_archived(ended: Application) -> None:
    sha256 = ref_of(batch_of("r1-train-1-0-0"))
    async with administering(ended.database.url) as admin:
        await admin.execute("update artifacts set data = 'x' where sha256 = $1", sha256)
    answer = await ended.post("/runs/first/archive", {})
    assert answer.status_code == 500
    assert "cannot be archived" in answer.json()["detail"]
    assert (await ended.get("/runs"))["total_count"] == 1


async def test_an_archive_is_a_tar_that_anybody_can_read(
    ended: Application, tmp_path: Path
) -> None:
    await archived(ended)
    notice = await ended.services.retention._notice("r1")
    assert notice is not None
    path = tmp_path / "archive.tar.gz"
    path.write_bytes(await ended.services.blobs.get_blob(notice.archive.uri))
    with tarfile.open(path) as tar:
        names = tar.getnames()
    assert (names[0], names[-1]) == ("archive.json", "end.json")
    assert "events/000001.jsonl" in names
    found = {member.kind: member for member in members(path, "r1")}
    assert set(found) == {"events", "rows", "blobs"}
    with pytest.raises(CorruptData, match="is of run r1, not of r2"):
        list(members(path, "r2"))
    unpacked = gzip.decompress(path.read_bytes())
    (tmp_path / "torn").write_bytes(gzip.compress(unpacked[: len(unpacked) // 2]))
    with pytest.raises(CorruptData):
        list(members(tmp_path / "torn", "r1"))
    (tmp_path / "noise").write_bytes(b"noise")
    with pytest.raises(CorruptData, match="not an archive"):
        list(members(tmp_path / "noise", "r1"))


async def test_the_same_history_makes_the_same_archive(ended: Application) -> None:
    archives = ended.services.archives
    assert await archives.pack("r1") == await archives.pack("r1")


async def test_a_count_that_does_not_fit_removes_nothing(ended: Application) -> None:
    """The run got another event after it was packed."""
    archives: Archives = ended.services.archives
    packed = await archives.pack("r1")
    notice = RunArchived(
        run="r1",
        archive=packed.ref,
        num_events=packed.num_events,
        num_artifacts=0,
        run_name="first",
        status="finished",
        phase="complete",
    )
    before = await count(ended, "events")
    with pytest.raises(Moved):
        await archives.remove(notice, cause=uuid4(), num_events=packed.num_events - 1)
    assert await count(ended, "events") == before


async def test_after_a_move_to_another_cluster_a_run_is_restored_in_order(
    ended: Application,
) -> None:
    """The transaction ids were forgotten, because those of the archive must not lie above every
    cursor."""
    before = await views(ended)
    await archived(ended)
    await ended.services.log.advance([ConsumerName("run")], await ended.services.log.visible_head())
    async with administering(ended.database.url) as admin, admin.transaction():
        await repair(admin)
    await restored(ended)
    xids = await ended.database.durable.fetch("select distinct xid::text as x from events")
    assert "0" in {row["x"] for row in xids}
    assert len(xids) <= 2, "the notice of the restore is new"
    after = await views(ended)
    for view in ("samples", "trace", "evaluations", "groups"):
        assert after[view] == before[view]
    told = ended.services.log
    run = ConsumerName("run")
    history = await told.read("r1", after=Cursor(), limit=1000)
    due = await told.unconsumed([(run, recorded) for recorded in history])
    assert {recorded.type for _, recorded in due} <= {"rl.run.restored"}


async def test_the_role_of_processes_removes_events_by_these_functions_alone(
    ended: Application,
) -> None:
    for statement in (
        "delete from events",
        "select set_config('headrace.removes', pg_current_xact_id()::text, false); delete from events",
        "select begin_removal('0', 0)",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await ended.database.durable.execute(statement)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await ended.database.durable.fetch(
            "select * from remove_run('unknown', true, 0, $1, 't', 1, '{}', $1)", uuid4()
        )
    assert refused.value.sqlstate == "HR004"


async def test_a_key_that_made_a_deleted_run_makes_no_other(app: Application) -> None:
    (await app.upload("sums", rows(20))).raise_for_status()
    asked = {"config": _config(), "name": "short"}
    made = await app.post("/runs", asked, Idempotency_Key="k")
    assert made.status_code == 201, made.text
    run = made.json()["run"]["id"]
    await app.append([RunStopped(run=run, step=0)])
    assert (await deleted(app, "/runs/short")).status_code == 200
    again = await app.post("/runs", asked, Idempotency_Key="k")
    assert again.status_code == 409
    assert "was deleted" in again.json()["detail"]
    assert (await app.post("/runs", asked, Idempotency_Key="l")).status_code == 201


def _config() -> dict[str, Any]:
    return {
        "experiment": {"model_path": f"scratch:{MODEL.name}", "dataset": "sums"},
        "advanced": {"algorithm": "sft", "max_steps": 1},
    }


async def test_gc_archives_what_ended_long_ago(ended: Application) -> None:
    await ended_run(ended, "r2", "second")
    assert (await ended.get("/gc", older_than_s=3600))["runs"] == []
    due = (await ended.get("/gc", older_than_s=0))["runs"]
    assert [run["name"] for run in due] == ["first", "second"]
    retention, clock = ended.services.retention, ended.services.clock
    assert await retention.archive_old(clock, older_than=timedelta(days=1)) == 0
    assert await retention.archive_old(clock, older_than=timedelta()) == 2
    await ended.services.readmodel.caught_up(await ended.services.log.visible_head())
    assert (await ended.get("/runs", archived="true"))["total_count"] == 2
    await restored(ended)
    assert await retention.archive_old(clock, older_than=timedelta(hours=1)) == 0
    collected = await ended.post("/gc", {})
    assert collected.json()["collected"] == 0
