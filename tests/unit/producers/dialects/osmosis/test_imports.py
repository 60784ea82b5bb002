"""`eval upload`: a finished local evaluation is imported, shown, replaced, and refused when it is not
what it says."""

import asyncio
import copy
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from producers.core.evaluations.imports import EvaluationImports
from schemas.events import EvaluationCompleted, EvaluationImported, GroupGraded
from tests.kit.application import Application, rows
from tests.kit.local_evaluation import (
    RUN,
    LocalEvaluation,
    attempt_id,
    in_lines,
    line,
    local_evaluation,
)
from tests.kit.tenants import Tenant
from tests.unit.producers.dialects.osmosis.test_datasets import put
from tests.unit.producers.dialects.osmosis.test_datasets import upload as upload_dataset

pytestmark = pytest.mark.postgres

DATA = rows(5).encode()
TRAJECTORY = f"rollout_trials/{attempt_id(0, 0)}/trajectory.json"


async def ask(
    app: Application, tenant: Tenant, path: str, body: Any = None, *, status: int = 200
) -> Any:
    headers = {"Authorization": f"Bearer {tenant.api_key}", "X-Osmosis-Workspace": tenant.name}
    method = "GET" if body is None else "POST"
    place = f"/api/cli/eval-runs{path}"
    answer = await app.api.request(method, place, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


async def send(
    app: Application, tenant: Tenant, session: Mapping[str, Any], files: Mapping[str, bytes]
) -> None:
    """Send what is pending, as the client does."""
    place = f"/imports/{session['session_id']}/uploads"
    plans = await ask(app, tenant, place, {"paths": list(files)})
    for one in plans["files"]:
        sent = await put(app, one["upload"]["presigned_url"], files[one["path"]])
        assert sent.status_code == 200, sent.text
        await ask(app, tenant, f"{place}/complete", {"path": one["path"]})


async def upload(
    app: Application, tenant: Tenant, local: LocalEvaluation, *, status: int = 200, **more: Any
) -> Any:
    """Do what `eval upload` does. Returns the answer to the last request."""
    session = await ask(app, tenant, "/imports", local.request(**more), status=201)
    await send(app, tenant, session, local.files)
    return await ask(app, tenant, f"/imports/{session['session_id']}/finalize", {}, status=status)


@pytest.fixture
async def local(app: Application, ours: Tenant) -> LocalEvaluation:
    await upload_dataset(app, ours, "numbers", DATA)
    return local_evaluation(DATA)


async def test_an_import_is_shown_like_an_evaluation(
    app: Application, ours: Tenant, local: LocalEvaluation
) -> None:
    done = await upload(app, ours, local)
    assert (done["status"], done["eval_run_name"]) == ("finalized", "local-one")
    assert done["uploaded_files"] == done["expected_files"] == len(local.files)
    shown = await ask(app, ours, "/local-one")
    assert shown["eval_run"]["id"] == done["eval_run_id"]
    assert shown["eval_run"]["completed_at"].startswith("2026-11-28T10:00:30")
    assert shown["config"]["model_path"] == "openai/gpt-mini"
    results = shown["results"]
    counts = [results[name] for name in ("graded", "passed", "failed", "skipped", "total_runs")]
    assert counts == [2, 1, 1, 1, 3]
    assert (results["pass_rate"], results["total_tokens"]) == (pytest.approx(1 / 3), 30)
    figures = await ask(app, ours, "/local-one/metrics")
    assert figures["overview"]["duration_ms"] == 30_000
    assert figures["pass_at_k"] == [{"k": 1, "value": 0.5}, {"k": 2, "value": 1.0}]
    listed = (await ask(app, ours, ""))["eval_runs"]
    assert "local-one" in [one["name"] for one in listed]
    logs = (await ask(app, ours, "/local-one/logs"))["logs"]
    assert any("not graded here" in one["message"] for one in logs)


async def test_the_files_of_an_import_are_downloaded(
    app: Application, ours: Tenant, local: LocalEvaluation
) -> None:
    await upload(app, ours, local)
    found = (await ask(app, ours, "/local-one/samples/manifest"))["files"]
    paths = [one["path"] for one in found]
    note = "artifacts/row-000001/attempt-000/notes/\u00fcber.txt"
    assert note in paths
    assert "artifacts/row-000001/attempt-000/empty" in paths
    wanted = [note, "logs.txt", "trajectories/row-000001/attempt-001.json"]
    body = {"items": [{"path": path} for path in wanted]}
    urls = (await ask(app, ours, "/local-one/samples/download-urls", body))["items"]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.app)) as client:
        read = [(await client.get(one["url"])).content for one in urls]
    assert read[:2] == [b"<b>a note</b>", b"it ran\n"]
    conversation = json.loads(read[2])
    assert conversation["reward"] == 0.25
    roles = [one["role"] for one in conversation["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]


async def test_an_import_is_never_graded_by_us(
    app: Application, ours: Tenant, local: LocalEvaluation
) -> None:
    done = await upload(app, ours, local)
    events = await app.recorded(done["eval_run_id"])
    assert not [one for one in events if isinstance(one, GroupGraded)]
    (imported,) = [one for one in events if isinstance(one, EvaluationImported)]
    assert (imported.local_run.id, imported.number) == (RUN, 1)
    answer = await app.get(f"/evals/{done['eval_run_id']}")
    assert answer["imported"]["local_run"]["name"] == "local-one"


async def test_the_same_import_twice_is_one(
    app: Application, ours: Tenant, local: LocalEvaluation
) -> None:
    first = await upload(app, ours, local)
    again = await ask(app, ours, "/imports", local.request())
    assert again["status"] == "finalized"
    place = f"/imports/{again['session_id']}/finalize"
    assert await ask(app, ours, place, {}) == first == again
    events = await app.recorded(first["eval_run_id"], EvaluationCompleted)
    assert len(events) == 1
    assert await app.services.blobs.keys("uploads/") == []


async def test_other_results_replace_the_first_ones_on_request(
    app: Application, ours: Tenant, local: LocalEvaluation
) -> None:
    first = await upload(app, ours, local)
    lines = [
        line(0, 0, 0.0),
        line(0, 1, None, status="skipped", trajectory_filename=None),
        line(1, 0, 1.0),
        line(1, 1, 1.0, trajectory_filename=None),
    ]
    files = dict(local.files)
    del files[f"rollout_trials/{attempt_id(0, 1)}/trajectory.json"]
    second = LocalEvaluation(DATA, {**files, "index.jsonl": in_lines(lines)})
    refused = await ask(app, ours, "/imports", second.request(), status=409)
    assert "--replace" in refused["error"]
    done = await upload(app, ours, second, reimport=True)
    assert done["eval_run_id"] == first["eval_run_id"]
    results = (await ask(app, ours, "/local-one"))["results"]
    assert [results[name] for name in ("graded", "passed", "skipped")] == [3, 2, 1]
    other = LocalEvaluation(DATA, second.files, manifest="cd" * 32)
    body = other.request(reimport=True)
    assert "another run" in (await ask(app, ours, "/imports", body, status=409))["error"]


async def test_a_deleted_import_comes_again(
    app: Application, ours: Tenant, local: LocalEvaluation
) -> None:
    first = await upload(app, ours, local)
    gone = await app.api.delete(f"/api/v1/evals/{first['eval_run_id']}")
    assert gone.status_code == 200, gone.text
    await ask(app, ours, "/local-one", status=404)
    again = await upload(app, ours, local)
    assert again["eval_run_id"] == first["eval_run_id"]
    assert (await ask(app, ours, "/local-one"))["results"]["graded"] == 2


async def test_a_retry_says_where_the_run_was_made(
    app: Application, ours: Tenant, local: LocalEvaluation
) -> None:
    await upload(app, ours, local)
    refused = await ask(app, ours, "/local-one/retry", {}, status=409)
    where = {"config_path": "configs/eval/sums.toml", "eval_run_name": "local-one"}
    assert refused["local_run"] == where


async def test_an_import_of_another_workspace_is_absent(
    app: Application, ours: Tenant, theirs: Tenant, local: LocalEvaluation
) -> None:
    session = await ask(app, ours, "/imports", local.request(), status=201)
    place = f"/imports/{session['session_id']}"
    for path, body in (
        ("/uploads", {"paths": ["index.jsonl"]}),
        ("/uploads/complete", {"path": "index.jsonl"}),
        ("/finalize", {}),
    ):
        await ask(app, theirs, place + path, body, status=404)
    refused = await ask(app, theirs, "/imports", local.request(), status=400)
    assert refused["field"] == "run.experiment_config.dataset.name"


async def test_a_file_with_other_bytes_is_refused_and_sent_again(
    app: Application, ours: Tenant, local: LocalEvaluation
) -> None:
    session = await ask(app, ours, "/imports", local.request(), status=201)
    place = f"/imports/{session['session_id']}"
    [plan] = (await ask(app, ours, f"{place}/uploads", {"paths": ["logs.txt"]}))["files"]
    assert (await put(app, plan["upload"]["presigned_url"], b"it ram\n")).status_code == 200
    refused = await ask(app, ours, f"{place}/uploads/complete", {"path": "logs.txt"}, status=400)
    assert refused["field"] == "logs.txt"
    assert (
        "files have not arrived"
        in (await ask(app, ours, f"{place}/finalize", {}, status=409))["error"]
    )
    await send(app, ours, session, local.files)
    assert (await ask(app, ours, f"{place}/finalize", {}))["status"] == "finalized"


@pytest.mark.parametrize(
    ("path", "data", "field"),
    [
        ("index.jsonl", b"[" * 100_000, "index.jsonl:1"),
        ("progress.json", b"{}", "progress.json.total_runs"),
        (TRAJECTORY, b"{}", TRAJECTORY),
    ],
)
async def test_files_that_are_not_those_of_a_run_are_refused(
    app: Application, ours: Tenant, local: LocalEvaluation, path: str, data: bytes, field: str
) -> None:
    refused = await upload(app, ours, local.with_file(path, data), status=400)
    assert refused["field"] == field
    await ask(app, ours, "/local-one", status=404)
    again = local.with_file("logs.txt", b"now it ran")
    assert (await upload(app, ours, again))["eval_run_name"] == "local-one"


async def test_a_request_that_is_not_valid_names_its_field(
    app: Application, ours: Tenant, local: LocalEvaluation
) -> None:
    body = local.request()
    body["files"][0]["path"] = "../x"
    refused = await ask(app, ours, "/imports", body, status=400)
    assert refused["field"] == "files.0.path"
    body = local.request()
    body["run"]["experiment_config"]["dataset"]["sha256"] = "ab" * 32
    refused = await ask(app, ours, "/imports", body, status=400)
    assert refused["field"] == "run.experiment_config.dataset.sha256"


async def test_of_two_imports_at_once_one_is_recorded(
    app: Application, ours: Tenant, local: LocalEvaluation
) -> None:
    """Both began as the first import of their run, with different files."""
    others = [local, local.with_file("logs.txt", b"another log")]
    places = []
    for one in others:
        session = await ask(app, ours, "/imports", one.request(), status=201)
        await send(app, ours, session, one.files)
        places.append(f"/api/cli/eval-runs/imports/{session['session_id']}/finalize")
    headers = {"Authorization": f"Bearer {ours.api_key}", "X-Osmosis-Workspace": ours.name}
    posts = (app.api.post(place, json={}, headers=headers) for place in (*places, *places))
    answers = await asyncio.gather(*posts)
    done = {one.json()["session_id"] for one in answers if one.status_code == 200}
    assert len(done) == 1
    assert {one.status_code for one in answers} <= {200, 409, 503}
    found = (await ask(app, ours, "/local-one"))["eval_run"]["id"]
    assert len(await app.recorded(found, EvaluationImported)) == 1


async def test_an_import_that_another_process_finalizes_meanwhile_is_answered_too(
    app: Application, ours: Tenant, local: LocalEvaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one deletes the parts while this one reads them."""
    session = await ask(app, ours, "/imports", local.request(), status=201)
    await send(app, ours, session, local.files)
    identity, here = session["session_id"], app.services.evaluation_imports
    elsewhere = copy.copy(here)
    elsewhere._parsing = asyncio.Semaphore(1)
    store_row = EvaluationImports._store_row

    async def late(self: EvaluationImports, *arguments: Any) -> Any:
        if self is here:
            await elsewhere.finalize(identity)
        return await store_row(self, *arguments)

    monkeypatch.setattr(EvaluationImports, "_store_row", late)
    done = await ask(app, ours, f"/imports/{identity}/finalize", {})
    assert done["status"] == "finalized"
    assert len(await app.recorded(done["eval_run_id"], EvaluationImported)) == 1
