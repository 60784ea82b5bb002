"""Base models, and the LoRA models that runs made: checkpoints by the name RUN-step-N."""

import asyncio
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.checkpoints import ListedCheckpointJson
from infra.readmodel.deployments import Deployment
from infra.spine.ports.event_log import Cursor
from producers.core.lookup import Checkpoint
from producers.core.models.deployments import deployment_of, find_deployment
from producers.core.models.hub import endpoint
from producers.core.models.known_models import known_models
from producers.core.workspaces import Workspace
from producers.dialects.osmosis.requests import Wire, answer, page_answer, page_of, services
from producers.dialects.osmosis.scope import in_workspace, route
from producers.http.requests import cause_of
from schemas.deployments import checkpoint_name, shown_base_name
from schemas.errors import Conflict, NotFound

LOADED_WITHIN_S = 20.0
"""How long a request to deploy waits for the model to be loaded. The client waits for 30 s."""
LOOK_S = 0.1


class BaseModelWire(Wire):
    id: str
    model_name: str
    base_model: str
    creator_name: str | None = None
    created_at: str = ""
    updated_at: str = ""


class BaseModelDetailWire(BaseModelWire):
    namespace: str
    parameters: int | None
    context_window: int | None
    hf_url: str | None
    platform_url: str | None = None


class LoraModelWire(Wire):
    """A checkpoint. The deployment is that of this very checkpoint."""

    id: str
    model_name: str
    base_model: str
    training_run_name: str
    checkpoint_step: int
    reward: float | None
    created_at: datetime
    deployment_status: str
    deployed_at: datetime | None
    deployed_by: str | None


class LoraModelDetailWire(LoraModelWire):
    """`inference_model` is the name under which /v1 answers."""

    hf_upload_status: str
    hf_url: str | None
    uploaded_by: str | None
    inference_model: str


class DeployedWire(Wire):
    id: str
    model_name: str
    status: str


async def base_models(request: Request, workspace: Workspace) -> Response:
    """Return a page of the base models that this server knows."""
    del workspace
    page = page_of(request)
    known = await known_models()
    shown = known[page.offset : page.offset + page.limit]
    rows = [_base_model(str(model["name"])) for model in shown]
    return page_answer("models", rows, len(known), page)


async def base_model(request: Request, workspace: Workspace) -> Response:
    """Return the facts about a base model."""
    del workspace
    name = request.path_params["name"]
    for model in await known_models():
        if model["name"] == name:
            return answer(_base_model_detail(name, model))
    raise NotFound(
        f"there is no base model {name[:80]!r} in the list of this server; "
        "`osmosis model list --type base` shows all"
    )


async def lora_models(request: Request, workspace: Workspace) -> Response:
    """Return a page of the checkpoints with LoRA adapters, the newest first."""
    del workspace
    core, page = services(request), page_of(request)
    rows, total = await core.readmodel.checkpoint_pages.page(page, tuning="lora")
    deployments = await core.readmodel.deployments.all_deployments()
    return page_answer(
        "models",
        [_list_item(row, deployment_of(deployments, row["ref"])) for row in rows],
        total,
        page,
        active_deployments=sum(deployment.is_active for deployment in deployments),
        max_active_deployments=core.settings.serving.max_deployments,
    )


async def lora_model(request: Request, workspace: Workspace) -> Response:
    """Return one checkpoint, with its deployment and its newest upload to a hub."""
    del workspace
    core = services(request)
    found = await _checkpoint(request)
    deployments = await core.readmodel.deployments.all_deployments()
    uploads = await core.readmodel.hub_uploads.of(found.run.run, step=found.spec.step)
    newest = uploads[0] if uploads else None
    listed = _lora_model(found, deployment_of(deployments, found.ref))
    return answer(
        LoraModelDetailWire(
            **dict(listed),
            hf_upload_status=newest["status"] if newest else "",
            hf_url=newest["url"] if newest else None,
            uploaded_by=_owner_of(newest["requested_by"]) if newest else None,
            inference_model=f"{listed.base_model}:{listed.model_name}",
        )
    )


async def deploy(request: Request, workspace: Workspace) -> Response:
    """Deploy a checkpoint, and wait until it is loaded, if that is soon."""
    del workspace
    found = await _checkpoint(request)
    name, cursor = await services(request).deployment_requests.deploy(
        _name_of(found), name=None, cause=cause_of(request, "deploy")
    )
    deployment = await _await_deployment(request, name, cursor, is_active=True)
    if deployment.error and not deployment.is_active:
        raise Conflict(deployment.error)
    return answer(
        DeployedWire(id=_id_of(found), model_name=_name_of(found), status=_status(deployment))
    )


async def undeploy(request: Request, workspace: Workspace) -> Response:
    """End the deployment of a checkpoint. Nothing is changed when it has none."""
    del workspace
    found = await _checkpoint(request)
    core = services(request)
    deployments = await core.readmodel.deployments.all_deployments()
    deployed = deployment_of(deployments, found.ref)
    if deployed is not None:
        name, cursor = await core.deployment_requests.undeploy(
            deployed.ref, cause=cause_of(request, "undeploy")
        )
        deployed = await _await_deployment(request, name, cursor, is_active=False)
    return answer(
        DeployedWire(id=_id_of(found), model_name=_name_of(found), status=_status(deployed))
    )


async def _await_deployment(
    request: Request, name: str, cursor: Cursor, *, is_active: bool
) -> Deployment:
    """A deployment after the request at `cursor`, once it is active or not as wanted, or has failed, or
    when that takes too long."""
    readmodel = services(request).readmodel
    await readmodel.caught_up(cursor)
    until = time.monotonic() + LOADED_WITHIN_S
    while True:
        found = await find_deployment(readmodel.deployments, name)
        is_done = found.is_active == is_active or bool(found.error)
        if (is_done and not found.pending) or time.monotonic() >= until:
            return found
        await asyncio.sleep(LOOK_S)


async def _checkpoint(request: Request) -> Checkpoint:
    """The checkpoint with the name or the id (RUN@N) in the path. Raises NotFound."""
    return await services(request).lookup.checkpoint(request.path_params["name"])


def _base_model(name: str) -> BaseModelWire:
    return BaseModelWire(id=name, model_name=name, base_model=name)


def _base_model_detail(name: str, model: Mapping[str, object]) -> BaseModelDetailWire:
    parameters, context = model["parameters"], model["context"]
    return BaseModelDetailWire(
        **dict(_base_model(name)),
        namespace=name.rpartition("/")[0],
        parameters=parameters if isinstance(parameters, int) else None,
        context_window=context if isinstance(context, int) else None,
        hf_url=f"{endpoint()}/{name}" if model["kind"] == "hub" else None,
    )


def _list_item(row: ListedCheckpointJson, deployment: Deployment | None) -> LoraModelWire:
    return LoraModelWire(
        id=f"{row['run']}@{row['step']}",
        model_name=checkpoint_name(row["run_name"], row["step"]),
        base_model=shown_base_name(row["model"]),
        training_run_name=row["run_name"],
        checkpoint_step=row["step"],
        reward=row["reward"],
        created_at=row["created_at"],
        **_deployment_fields(deployment),
    )


def _lora_model(found: Checkpoint, deployment: Deployment | None) -> LoraModelWire:
    return LoraModelWire(
        id=_id_of(found),
        model_name=_name_of(found),
        base_model=shown_base_name(found.run.config.experiment.model_path),
        training_run_name=found.run.run_name,
        checkpoint_step=found.spec.step,
        reward=found.saved.reward,
        created_at=found.at,
        **_deployment_fields(deployment),
    )


def _id_of(found: Checkpoint) -> str:
    return f"{found.run.run}@{found.spec.step}"


def _name_of(found: Checkpoint) -> str:
    return checkpoint_name(found.run.run_name, found.spec.step)


def _deployment_fields(deployment: Deployment | None) -> dict[str, Any]:
    return {
        "deployment_status": _status(deployment),
        "deployed_at": deployment.deployed_at if deployment else None,
        "deployed_by": _owner_of(deployment.requested_by) if deployment else None,
    }


def _owner_of(actor: str | None) -> str | None:
    """The owner of an API key, from the text by which events name it."""
    return actor.partition("/")[0] if actor else None


def _status(deployment: Deployment | None) -> str:
    """`active`, `inactive`, or `loading` while a checkpoint is loaded for the first time."""
    if deployment is None:
        return "inactive"
    return "inactive" if deployment.status == "failed" else deployment.status


ROUTES = [
    route("/models/base", in_workspace(base_models), scope="read"),
    route("/models/base/{name:path}", in_workspace(base_model), scope="read"),
    route("/models/lora", in_workspace(lora_models), scope="read"),
    route("/models/{name}", in_workspace(lora_model), scope="read"),
    route("/models/{name}/deploy", in_workspace(deploy), scope="control", methods=("POST",)),
    route("/models/{name}/undeploy", in_workspace(undeploy), scope="control", methods=("POST",)),
]
