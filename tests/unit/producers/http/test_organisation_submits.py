"""Runs and evaluations that API keys of organisations submit: whose they become, and what their names
and those in their configs refer to."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from schemas.events import EvaluationCompleted, EvaluationRequested
from tests.kit.application import Application, application, rows
from tests.kit.specs import DATASET, template
from tests.kit.tenants import ask, create_api_key

pytestmark = pytest.mark.postgres

SFT: dict[str, Any] = {
    "experiment": {"model_path": "scratch:qwen3-tiny", "dataset": "numbers"},
    "advanced": {"algorithm": "sft", "batch_size": 4},
}
GRPO: dict[str, Any] = {
    "experiment": {
        "rollout": "say",
        "entrypoint": "main.py",
        "model_path": "scratch:qwen3-tiny",
        "dataset": "numbers",
    },
    "training": {"rollout_batch_size": 2, "n_samples_per_prompt": 2},
}


@pytest.fixture
async def shared(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    async with application(database_url, tmp_path / "home", repositories=("/a", "/b")) as app:
        for name in ("left", "right"):
            await app.post("/organisations", {"name": name})
            await app.post("/workspaces", {"url": "/a", "name": "sums", "organisation": name})
        yield app


async def upload(app: Application, api_key: str, name: str) -> str:
    """Upload a dataset, and return its id."""
    body = {"name": name, "file_name": "r.jsonl"}
    announced = await ask(app, "POST", "/api/v1/datasets", api_key, json=body)
    assert announced.status_code == 201, announced.text
    path = announced.json()["upload"]["path"]
    sent = await ask(app, "PUT", path, api_key, content=rows(8))
    assert sent.status_code == 200, sent.text
    return str(sent.json()["dataset"]["id"])


async def submit(
    app: Application, api_key: str, config: dict[str, Any], **fields: Any
) -> httpx.Response:
    """The answer to the request for a run."""
    body = {"config": config, **fields}
    return await ask(app, "POST", "/api/v1/runs", api_key, json=body)


async def test_a_run_without_a_rollout_belongs_to_the_only_workspace(shared: Application) -> None:
    left = await create_api_key(shared, "left", "admin", organisation="left")
    right = await create_api_key(shared, "right", "admin", organisation="right")
    for api_key in (left, right):
        await upload(shared, api_key, "numbers")
        made = await submit(shared, api_key, SFT, name="baseline")
        assert made.status_code == 201, made.text
        again = await submit(shared, api_key, SFT, name="baseline")
        assert again.status_code == 409
        own = await ask(shared, "GET", "/api/v1/runs/baseline", api_key)
        assert own.json()["run"]["id"] == made.json()["run"]["id"]
        requested = await shared.services.lookup.run(made.json()["run"]["id"])
        shown = await ask(shared, "GET", "/api/v1/workspaces/sums", api_key)
        assert requested.belongs_to == shown.json()["workspace"]["id"]
    both = await shared.api.get("/api/v1/runs/baseline")
    assert both.status_code == 409
    assert "2 runs have the name baseline" in both.json()["detail"]
    assert both.json()["detail"].count("(sums)") == 2


async def test_a_run_without_a_rollout_names_one_of_several_workspaces(
    shared: Application,
) -> None:
    left = await create_api_key(shared, "left", "admin", organisation="left")
    await shared.post("/workspaces", {"url": "/b", "name": "more", "organisation": "left"})
    await upload(shared, left, "numbers")
    refused = await submit(shared, left, SFT, name="baseline")
    assert refused.status_code == 400, refused.text
    assert refused.json()["issues"][0]["key"] == "workspace"
    assert (await submit(shared, left, SFT, workspace="absent")).status_code == 404
    for name in ("sums", "more"):
        made = await submit(shared, left, SFT, name="baseline", workspace=name)
        assert made.status_code == 201, made.text
        assert made.json()["run"]["workspace_name"] == name
    several = await ask(shared, "GET", "/api/v1/runs/baseline", left)
    assert several.status_code == 409
    assert "(more)" in several.json()["detail"]
    inner = await create_api_key(shared, "inner", "read", organisation="left", workspace="more")
    own = await ask(shared, "GET", "/api/v1/runs/baseline", inner)
    assert own.json()["run"]["id"] == made.json()["run"]["id"]


async def test_names_in_a_config_mean_the_senders_own_things(shared: Application) -> None:
    left = await create_api_key(shared, "left", "admin", organisation="left")
    right = await create_api_key(shared, "right", "admin", organisation="right")
    await upload(shared, left, "numbers")
    missing = await submit(shared, right, GRPO)
    assert missing.status_code == 400
    [issue] = [one for one in missing.json()["issues"] if one["key"] == "experiment.dataset"]
    assert issue["did_you_mean"] is None, "another organisation has it"
    close = {**GRPO, "experiment": {**GRPO["experiment"], "dataset": "number"}}
    for api_key, meant in ((left, "numbers"), (right, None)):
        answer = await submit(shared, api_key, close)
        assert answer.json()["issues"][0]["did_you_mean"] == meant
    theirs = await upload(shared, right, "numbers")
    made = await submit(shared, right, GRPO, name="first")
    assert made.status_code == 201, made.text
    run = await shared.services.lookup.run(made.json()["run"]["id"])
    assert run.dataset.dataset == theirs
    with_id = {**GRPO, "experiment": {**GRPO["experiment"], "dataset": theirs}}
    assert (await submit(shared, left, with_id)).status_code == 400


async def test_a_dataset_of_the_workspace_comes_before_a_shared_one(shared: Application) -> None:
    left = await create_api_key(shared, "left", "admin", organisation="left")
    inner = await create_api_key(
        shared, "inner", "admin", organisation="left", workspace=await _sums(shared, left)
    )
    common, own = await upload(shared, left, "numbers"), await upload(shared, inner, "numbers")
    assert common != own
    for api_key in (inner, left):
        made = await submit(shared, api_key, GRPO)
        assert made.status_code == 201, made.text
        run = await shared.services.lookup.run(made.json()["run"]["id"])
        assert run.dataset.dataset == own, "the request is for its workspace"
    shown = await ask(shared, "GET", "/api/v1/datasets/numbers", inner)
    assert shown.json()["dataset"]["id"] == own
    both = await ask(shared, "GET", "/api/v1/datasets/numbers", left)
    assert both.status_code == 409
    for each in (common, own):
        assert each in both.json()["detail"]
    kept = await ask(shared, "DELETE", f"/api/v1/datasets/{own}", inner)
    assert (kept.status_code, "cannot be deleted" in kept.text) == (409, True)


async def test_a_refusal_to_delete_names_nothing_of_another_workspace(
    shared: Application,
) -> None:
    left = await create_api_key(shared, "left", "admin", organisation="left")
    await shared.post("/workspaces", {"url": "/b", "name": "more", "organisation": "left"})
    inner = await create_api_key(
        shared, "inner", "admin", organisation="left", workspace=await _sums(shared, left)
    )
    own = await upload(shared, inner, "numbers")
    config = {**SFT, "experiment": {**SFT["experiment"], "dataset": own}}
    made = await submit(shared, left, config, name="secret-name", workspace="more")
    assert made.status_code == 201, made.text
    for api_key, is_named in ((inner, False), (left, True)):
        kept = await ask(shared, "DELETE", f"/api/v1/datasets/{own}", api_key)
        assert kept.status_code == 409, kept.text
        assert ("secret-name" in kept.text) is is_named
        assert ("of another workspace" in kept.text) is not is_named


async def test_an_ended_evaluation_of_another_workspace_keeps_nothing_from_being_deleted(
    shared: Application,
) -> None:
    left = await create_api_key(shared, "left", "admin", organisation="left")
    made = await shared.post("/workspaces", {"url": "/b", "name": "more", "organisation": "left"})
    inner = await create_api_key(
        shared, "inner", "admin", organisation="left", workspace=await _sums(shared, left)
    )
    own = await upload(shared, inner, "numbers")
    evaluation = EvaluationRequested(
        evaluation="e1",
        eval_name="secret-name",
        template=template(dataset=DATASET.model_copy(update={"dataset": own})),
        rows=(0,),
        workspace=made.json()["workspace"]["id"],
    )
    names = shared.services.readmodel.names
    await names.take("evaluation", "secret-name", "e1", scope=str(evaluation.workspace))
    await shared.append([evaluation])
    kept = await ask(shared, "DELETE", f"/api/v1/datasets/{own}", inner)
    assert kept.status_code == 409, kept.text
    assert "some of another workspace" in kept.text
    await shared.append([EvaluationCompleted(evaluation="e1", status="finished", reward=1.0)])
    gone = await ask(shared, "DELETE", f"/api/v1/datasets/{own}", inner)
    assert gone.status_code == 200, gone.text


async def _sums(app: Application, api_key: str) -> str:
    shown = await ask(app, "GET", "/api/v1/workspaces/sums", api_key)
    return str(shown.json()["workspace"]["id"])
