"""Deployments: deploy a checkpoint, list and show deployments, and end one."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.deployments import Deployment
from infra.spine.ports.event_log import Cursor
from producers.core.models.deployments import find_deployment
from producers.http.requests import body_of, cause_of
from producers.http.responses import ApiResponse
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute


async def page(request: Request) -> Response:
    found = await services(request).readmodel.deployments.all_deployments()
    rows = [deployment_json(deployment) for deployment in found]
    return ApiResponse(
        {
            "deployments": rows,
            "total_count": len(rows),
            "active_deployments": sum(deployment.is_active for deployment in found),
            "max_active_deployments": services(request).settings.serving.max_deployments,
        }
    )


async def show(request: Request) -> Response:
    """A deployment, and what each API key used of it."""
    readmodel = services(request).readmodel
    found = await find_deployment(readmodel.deployments, request.path_params["name"])
    keys = await readmodel.deployments.usage(found.served) if found.served else []
    return ApiResponse({"deployment": {**deployment_json(found), "usage_by_api_key": keys}})


async def deploy(request: Request) -> Response:
    body = await body_of(request, ("checkpoint", "name"))
    requests = services(request).deployment_requests
    name, cursor = await requests.deploy(
        body.text("checkpoint"), name=body.optional("name"), cause=cause_of(request, "deploy")
    )
    return await _answer(request, name, cursor, status=202)


async def undeploy(request: Request) -> Response:
    name = request.path_params["name"]
    requests = services(request).deployment_requests
    name, cursor = await requests.undeploy(name, cause=cause_of(request, "undeploy"))
    return await _answer(request, name, cursor, status=202)


async def _answer(request: Request, name: str, cursor: Cursor, *, status: int) -> Response:
    """The deployment once the read model has the request at `cursor`."""
    readmodel = services(request).readmodel
    await readmodel.caught_up(cursor)
    found = await find_deployment(readmodel.deployments, name)
    return ApiResponse({"deployment": deployment_json(found)}, status_code=status)


def deployment_json(found: Deployment) -> Mapping[str, object]:
    """A deployment as clients get it."""
    served = found.served
    weights = served.policy.weights if served else None
    return {
        "name": found.name,
        "ref": found.ref,
        "model": served.model_name if served else None,
        "base_model": served.base_name if served else None,
        "status": found.status,
        "checkpoint": served.ref if served else None,
        "run": served.run if served else None,
        "run_name": served.run_name if served else None,
        "step": served.step if served else None,
        "reward": served.reward if served else None,
        "adapter_sha256": weights.sha256 if weights else None,
        "version": found.number,
        "workspace": found.workspace,
        "workspace_name": found.workspace_name,
        "pending": found.pending or None,
        "error": found.error or None,
        "requested_by": found.requested_by,
        "created_at": found.created_at,
        "deployed_at": found.deployed_at,
        "usage": {
            "requests": found.usage.requests,
            "prompt_tokens": found.usage.prompt_tokens,
            "completion_tokens": found.usage.completion_tokens,
        },
    }


ROUTES = [
    ScopedRoute("/deployments", page, scope="read"),
    ScopedRoute("/deployments", deploy, scope="control", methods=["POST"]),
    ScopedRoute("/deployments/{name:path}", show, scope="read"),
    ScopedRoute("/deployments/{name:path}", undeploy, scope="control", methods=["DELETE"]),
]
