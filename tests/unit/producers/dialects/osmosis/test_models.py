"""Base models and LoRA models on the wire of the osmosis client."""

from typing import Any

import pytest

from producers.dialects.osmosis import models
from schemas.events import ModelDeployed, ModelDeployRequested
from schemas.models.served import served_model
from tests.kit.application import Application
from tests.kit.tenants import Tenant, ask

pytestmark = pytest.mark.postgres


async def wire(
    app: Application, tenant: Tenant, path: str, *, method: str = "GET", status: int = 200
) -> Any:
    """The body of a response below /api/cli/models."""
    headers = {"X-Osmosis-Workspace": tenant.name}
    answer = await ask(app, method, f"/api/cli/models{path}", tenant.api_key, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


async def load(app: Application, tenant: Tenant) -> None:
    """Answer the newest request to deploy, as the process that serves does."""
    [name, pending] = await app.database.durable.fetchrow(
        "select deployment, pending from deployments where pending <> ''"
    )
    checkpoint = await app.services.lookup.checkpoint(pending)
    served = served_model(checkpoint.run, checkpoint.spec, name=name, reward=None)
    await app.append([ModelDeployed(deployment=name, request="q", served=served, number=1)])


async def test_base_models_are_those_of_the_server(app: Application, ours: Tenant) -> None:
    listed = await wire(app, ours, "/base?limit=50&offset=0")
    names = [model["model_name"] for model in listed["models"]]
    assert "scratch:qwen3-tiny" in names
    assert listed["total_count"] == len(names)
    shown = await wire(app, ours, "/base/scratch:qwen3-tiny")
    assert shown["id"] == shown["base_model"] == "scratch:qwen3-tiny"
    assert shown["parameters"] > 0
    assert "inference_input_usd_per_million_tokens" not in shown, "the client hides prices"
    unknown = await wire(app, ours, "/base/no%2Fsuch", status=404)
    assert unknown["code"] == "NOT_FOUND"


async def test_checkpoints_are_lora_models_of_their_workspace(
    app: Application, ours: Tenant, theirs: Tenant
) -> None:
    listed = await wire(app, ours, "/lora?limit=50&offset=0")
    [model] = listed["models"]
    assert model["model_name"] == f"{ours.run_name}-step-3"
    assert (model["training_run_name"], model["checkpoint_step"]) == (ours.run_name, 3)
    assert model["deployment_status"] == "inactive"
    assert (listed["active_deployments"], listed["max_active_deployments"]) == (0, 5)
    for key in (model["model_name"], model["id"]):
        shown = await wire(app, ours, f"/{key}")
        assert shown["inference_model"] == f"{model['base_model']}:{model['model_name']}"
        assert {key: shown[key] for key in model} == model
    absent = await wire(app, ours, f"/{theirs.run_name}-step-3", status=404)
    unknown = await wire(app, ours, "/nobody-step-3", status=404)
    assert absent["error"].replace(theirs.run_name, "nobody") == unknown["error"]


async def test_a_lora_model_is_deployed_and_undeployed(
    app: Application, ours: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "LOADED_WITHIN_S", 0.0)
    path = f"/{ours.run_name}-step-3"
    begun = await wire(app, ours, f"{path}/deploy", method="POST")
    assert begun["status"] == "loading"
    assert begun["model_name"] == f"{ours.run_name}-step-3"
    await load(app, ours)
    shown = await wire(app, ours, path)
    assert shown["deployment_status"] == "active"
    assert shown["deployed_by"] == "admin"
    listed = await wire(app, ours, "/lora")
    assert listed["active_deployments"] == 1
    ended = await wire(app, ours, f"{path}/undeploy", method="POST")
    assert ended["id"] == begun["id"]


async def test_a_model_that_was_never_deployed_is_undeployed_without_an_error(
    app: Application, ours: Tenant
) -> None:
    ended = await wire(app, ours, f"/{ours.run_name}-step-3/undeploy", method="POST")
    assert ended["status"] == "inactive"


async def test_a_checkpoint_that_cannot_be_loaded_is_a_conflict(
    app: Application, ours: Tenant, theirs: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another base model is deployed."""
    checkpoint = await app.services.lookup.checkpoint(f"{theirs.run}@3")
    served = served_model(checkpoint.run, checkpoint.spec, name="other", reward=None)
    other = served.model_copy(update={"model": served.model.model_copy(update={"name": "x"})})
    asked = ModelDeployRequested(deployment="other", request="q", served=other)
    await app.append(
        [asked, ModelDeployed(deployment="other", request="q", served=other, number=1)]
    )
    refused = await wire(app, ours, f"/{ours.run_name}-step-3/deploy", method="POST", status=409)
    assert "another base model" in refused["error"]
    assert "other" not in refused["error"].replace("another", ""), "theirs has no name here"
