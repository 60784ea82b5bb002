"""Training runs as the client submits and reads them: every field that it requires, names and ids as
keys, pages, logs, metrics and stops."""

import contextlib
from datetime import datetime
from typing import Any

import httpx
import pytest

from schemas.events import RunRequested, RunStopRequested
from schemas.secrets.secret_value import SecretValue
from tests.kit.application import API_KEY, Application, rows
from tests.kit.tenants import Tenant, ask, create_api_key

pytestmark = pytest.mark.postgres

RUNS = "/api/cli/training-runs"
OURS = {"X-Osmosis-Git": "acme/ours"}
EXPERIMENT = {
    "rollout": "say",
    "entrypoint": "main.py",
    "model_path": "scratch:qwen3-tiny",
    "dataset": "numbers",
}
BODY: dict[str, Any] = {
    "experiment_config": EXPERIMENT,
    "training_config": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "lr": 1e-3},
    "sampling_config": {"rollout_temperature": 0.7},
    "checkpoints_config": {"checkpoint_save_freq": 3},
    "advanced_config": {"seed": 11},
    "env_config": {"LOG_LEVEL": "INFO"},
}
DOCUMENT = {
    "experiment": EXPERIMENT,
    "training": BODY["training_config"],
    "sampling": BODY["sampling_config"],
    "checkpoints": BODY["checkpoints_config"],
    "advanced": BODY["advanced_config"],
    "env": BODY["env_config"],
}
"""The document that a TOML with the same sections makes."""


async def call(
    app: Application, method: str, path: str, body: object = None, *, key: str = API_KEY
) -> httpx.Response:
    content = {} if body is None else {"json": body}
    return await ask(app, method, path, key, headers=OURS, **content)


async def read(app: Application, path: str) -> dict[str, Any]:
    answer = await call(app, "GET", path)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def submit(app: Application, body: object = BODY) -> dict[str, Any]:
    answer = await call(app, "POST", RUNS, body)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
async def ready(app: Application, ours: Tenant) -> Application:
    """The workspace `ours` with a finished run, and a dataset."""
    del ours
    assert (await app.upload("numbers", rows(8))).status_code == 200
    return app


async def test_a_submission_is_what_the_toml_is(ready: Application) -> None:
    made = await submit(ready)
    assert set(made) == {"id", "name", "status", "created_at", "platform_url"}
    assert made["status"] == "pending"
    assert datetime.fromisoformat(made["created_at"]).tzinfo is not None
    assert made["platform_url"].endswith(f"/runs/{made['id']}")
    native = await ready.post("/runs", {"config": DOCUMENT, "workspace": "ours"})
    assert native.status_code == 201, native.text
    [theirs] = await ready.recorded(made["id"], RunRequested)
    [own] = await ready.recorded(native.json()["run"]["id"], RunRequested)
    assert isinstance(theirs, RunRequested)
    assert isinstance(own, RunRequested)
    ignored = {"run": "", "run_name": "", "belongs_to": None}
    assert theirs.model_copy(update=ignored) == own.model_copy(update=ignored)


@pytest.mark.parametrize(
    "changes",
    [
        {"training_config": {"lr": 7}},
        {"training_config": {"lr": "fast", "max_prompt_length": 0}},
        {"training_config": {"learning_rate": 1e-3}},
        {"advanced_config": {"sead": 7}},
        {"advanced_config": {"algorithm": "grop"}},
        {"env_config": {"PATH": "/x"}},
        {"env_config": {"lower": "x"}},
        {"env_config": {"A": 7}},
        {"training_config": []},
        {"training_config": "x"},
        {"experiment_config": {}},
        {"experiment_config": {**EXPERIMENT, "dataset": "number"}},
        {"experiment_config": {**EXPERIMENT, "rollout": "../say"}},
        {"experiment_config": {**EXPERIMENT, "branch": "a", "commit_sha": "0123456"}},
    ],
)
async def test_a_mistake_has_the_issues_of_the_toml(
    ready: Application, changes: dict[str, Any]
) -> None:
    answer = await call(ready, "POST", RUNS, BODY | changes)
    names = {**{f"{name}_config": name for name in DOCUMENT}}
    document = DOCUMENT | {names[wire]: value for wire, value in changes.items()}
    native = await ready.post("/runs", {"config": document, "workspace": "ours"})
    assert answer.status_code == native.status_code == 400
    error = answer.json()
    assert error["error"] == "Invalid training config"
    assert error["code"] == "VALIDATION"
    assert error["issues"] == [
        {"key": one["key"], "message": one["message"]}
        | ({"key_correction": one["did_you_mean"]} if one["did_you_mean"] else {})
        for one in native.json()["issues"]
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"nothing",
        b'{"experiment_config": NaN}',
        b"[" * 100_000,
        b'{"secrets": {"required": "KEY"}}',
        b'{"secrets": {"provided": {"KEY": 7}}}',
        b'{"experiment_config": {"rollout": "\\u0000"}}',
        b'{"experiment_config": {"rollout": "\\ud800"}}',
        b"\xff\xfe",
        b'{"a": "' + b"x" * (2 << 20) + b'"}',
    ],
)
async def test_a_body_that_is_none_is_refused_in_the_form_of_the_client(
    ready: Application, content: bytes
) -> None:
    answer = await ask(ready, "POST", RUNS, API_KEY, headers=OURS, content=content)
    assert answer.status_code == 400, answer.text
    assert answer.json()["code"] == "VALIDATION"
    assert answer.json()["error"]


async def test_fields_of_a_newer_client_are_ignored(ready: Application) -> None:
    await submit(ready, {**BODY, "future_config": {"a": 1}, "secrets": {"required": [], "new": 1}})


async def test_missing_secrets_are_listed_for_the_hint_of_the_client(ready: Application) -> None:
    needs = {**BODY, "secrets": {"required": ["B_KEY", "A_KEY", "C_KEY"]}}
    needs["secrets"]["provided"] = {"C_KEY": "hush-hush-1"}
    answer = await call(ready, "POST", RUNS, needs)
    assert answer.status_code == 404
    assert answer.json()["error"] == "Secret(s) not found: B_KEY, A_KEY"
    assert answer.json()["platform_url"]
    both = await call(ready, "POST", RUNS, {**needs, "training_config": {"lr": 7}})
    assert both.status_code == 400, "another mistake is told first"
    needs["secrets"]["provided"] = dict.fromkeys(("A_KEY", "B_KEY", "C_KEY"), "hush-hush-1")
    made = await submit(ready, needs)
    stored = ready.services.secret_store
    found = await stored.resolve(["B_KEY"], workspace=None, submitter=None, run=made["id"])
    assert found == {"B_KEY": SecretValue("hush-hush-1")}
    assert "hush" not in (await call(ready, "GET", f"{RUNS}/{made['id']}")).text


async def test_a_run_is_found_by_name_and_id_with_all_fields(
    ready: Application, ours: Tenant
) -> None:
    for ref in (ours.run, ours.run_name):
        found = await read(ready, f"{RUNS}/{ref}")
        run = found["training_run"]
        assert (run["id"], run["name"], run["status"]) == (ours.run, ours.run_name, "finished")
        assert set(found["model"]) == set(found["dataset"]) == {"id", "name"}
        for key in ("config", "entrypoint", "env_config", "resolved_secret_scopes"):
            assert key in found
        assert found["is_internal_user"] is False
    [listed] = (await read(ready, RUNS))["training_runs"]
    assert set(listed["model"]) == {"id", "model_name"}
    used = (await ready.get(f"/runs/{ours.run}"))["run"]
    assert listed["dataset"] == {"id": used["dataset_id"], "file_name": used["dataset"]}
    assert found["dataset"]["id"] == used["dataset_id"] != used["dataset"]
    assert listed.keys() >= run.keys() - {"examples_processed_count", "notes"}


async def test_pages_continue_where_they_ended(ready: Application) -> None:
    made = {(await submit(ready))["id"] for _ in range(3)}
    seen, offset = [], 0
    while offset is not None:
        page = await read(ready, f"{RUNS}?limit=2&offset={offset}")
        assert page["total_count"] == 4
        assert page["has_more"] is (page["next_offset"] is not None)
        seen += [run["id"] for run in page["training_runs"]]
        offset = page["next_offset"]
    assert len(seen) == 4
    assert made < set(seen)
    beyond = await read(ready, f"{RUNS}?limit=2&offset=99")
    assert (beyond["training_runs"], beyond["has_more"], beyond["next_offset"]) == ([], False, None)


async def test_checkpoints_have_the_name_that_deploys_them(
    ready: Application, ours: Tenant
) -> None:
    found = await read(ready, f"{RUNS}/{ours.run_name}/checkpoints")
    assert found["training_run_name"] == ours.run_name
    [one] = found["checkpoints"]
    assert one["checkpoint_name"] == f"{ours.run_name}-step-3"
    assert (one["id"], one["checkpoint_step"]) == (f"{ours.run}@3", 3)
    assert one["status"]
    assert one["created_at"]


async def test_metrics_have_the_titles_and_exact_ends(ready: Application, ours: Tenant) -> None:
    values = {step: float((step * 37) % 1001) for step in range(5000)}
    await ready.database.durable.execute(
        "delete from metric_points where run = $1 and key = 'rollout/truncated_ratio'", ours.run
    )
    await ready.database.durable.execute(
        "insert into metric_points (run, key, step, value, at)"
        " select $1, 'rollout/truncated_ratio', p.*, '2026-01-01 00:00:00.5+00'"
        " from unnest($2::int[], $3::float8[]) as p",
        ours.run,
        list(values),
        list(values.values()),
    )
    await ready.database.durable.execute(
        "insert into metric_points values ($1, 'train/kl', 1, 'NaN', now())", ours.run
    )
    found = await read(ready, f"{RUNS}/{ours.run}/metrics")
    assert found["status"] == "finished"
    overview = found["overview"]
    assert overview["duration_ms"] >= 0
    one = next(m for m in found["metrics"] if m["metric_key"] == "rollout/truncated_ratio")
    assert one["title"] == "Truncation Ratio"
    points = one["data_points"]
    assert 400 < len(points) <= 500
    assert points[0] == {"step": 0, "value": 0.0, "timestamp": 1767225600500}
    assert (points[-1]["step"], points[-1]["value"]) == (4999, values[4999])
    assert all(point["value"] == values[point["step"]] for point in points)
    assert [p["step"] for p in points] == sorted({p["step"] for p in points})
    [summary] = [s for s in overview["metric_summaries"] if s["key"] == one["metric_key"]]
    assert summary == {
        "key": one["metric_key"],
        "title": "Truncation Ratio",
        "initial": 0.0,
        "latest": values[4999],
        "delta": values[4999],
        "min": min(values.values()),
        "max": max(values.values()),
    }
    assert "train/kl" not in {m["metric_key"] for m in found["metrics"]}, "it has no finite point"


async def test_a_log_is_read_to_its_beginning_without_gaps(
    ready: Application, ours: Tenant
) -> None:
    whole = await read(ready, f"{RUNS}/{ours.run}/logs?limit=200")
    lines = whole["logs"]
    assert len(lines) > 3
    assert [line["timestamp"] for line in lines] == sorted(line["timestamp"] for line in lines)
    assert all(isinstance(line["step"], str) and line["level"] for line in lines)
    pieces: list[Any] = []
    cursor = ""
    while True:
        page = await read(ready, f"{RUNS}/{ours.run}/logs?limit=2&direction=older{cursor}")
        pieces = page["logs"] + pieces
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert pieces == lines
    for query in ("limit=201", "limit=0", "direction=up", "cursor=x", "cursor=1-2-zz"):
        answer = await call(ready, "GET", f"{RUNS}/{ours.run}/logs?{query}")
        assert answer.status_code == 400, query
        assert answer.json()["code"] == "VALIDATION"


async def test_a_run_is_stopped_once_however_often_it_is_asked(ready: Application) -> None:
    made = await submit(ready)
    for ref in (made["name"], made["id"], made["name"]):
        answer = await call(ready, "POST", f"{RUNS}/{ref}/stop", {})
        assert answer.status_code == 200, answer.text
        assert answer.json()["name"] == made["name"]
    assert len(await ready.recorded(made["id"], RunStopRequested)) == 1


async def test_a_finished_run_is_not_stopped(ready: Application, ours: Tenant) -> None:
    answer = await call(ready, "POST", f"{RUNS}/{ours.run}/stop", {})
    assert (answer.status_code, answer.json()["code"]) == (409, "CONFLICT")


@pytest.mark.parametrize("rest", ["", "/checkpoints", "/metrics", "/logs", "/stop"])
async def test_the_runs_of_another_workspace_are_absent(
    ready: Application, theirs: Tenant, rest: str
) -> None:
    """Also for a key that sees both, because the request names one of them."""
    method = "POST" if rest == "/stop" else "GET"
    for ref in (theirs.run, theirs.run_name):
        answer = await call(ready, method, f"{RUNS}/{ref}{rest}", {} if rest == "/stop" else None)
        absent = await call(ready, method, f"{RUNS}/none{rest}", {} if rest == "/stop" else None)
        assert answer.status_code == absent.status_code == 404
        assert answer.text.replace(ref, "none") == absent.text


async def test_twin_without_narrowing_another_workspaces_run_is_found(
    ready: Application, theirs: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "producers.dialects.osmosis.scope.narrowed_to", lambda *_: contextlib.nullcontext()
    )
    assert (await call(ready, "GET", f"{RUNS}/{theirs.run}")).status_code == 200


async def test_a_viewer_submits_nothing(ready: Application) -> None:
    viewer = await create_api_key(ready, "viewer", "read")
    for path, body in ((RUNS, BODY), (f"{RUNS}/x/stop", {})):
        answer = await call(ready, "POST", path, body, key=viewer)
        assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN")
