"""Deployments: what is served, a form to deploy a checkpoint, and what each API key used."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from producers.core.models.deployments import find_deployment
from producers.dashboard.forms import read_session_form
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.requests import cause_of
from producers.http.responses import ApiResponse
from producers.http.routes import deployments
from producers.http.routes.deployments import deployment_json
from producers.http.routes.runs import services
from schemas.errors import Issue, Refused


async def index(request: Request) -> Response:
    checkpoint = request.query_params.get("checkpoint", "")
    return await _page(request, {"checkpoint": checkpoint})


async def rows(request: Request) -> Response:
    """The deployments as JSON."""
    found = await services(request).readmodel.deployments.all_deployments()
    return ApiResponse({"deployments": [deployment_json(one) for one in found]})


async def show(request: Request) -> Response:
    readmodel = services(request).readmodel
    found = await find_deployment(readmodel.deployments, request.path_params["name"])
    used = await readmodel.deployments.usage(found.served) if found.served else []
    return html(request, "deployment.html", {"one": deployment_json(found), "used": used})


async def deploy(request: Request) -> Response:
    """Ask for a deployment, and show it in the list, where it is loaded."""
    fields = await read_session_form(request)
    core = services(request)
    try:
        _, cursor = await core.deployment_requests.deploy(
            fields.get("checkpoint", "").strip(),
            name=fields.get("name", "").strip() or None,
            cause=cause_of(request, "deploy"),
        )
    except Refused as error:
        issues = error.issues or (Issue("", error.message),)
        return await _page(request, fields, issues=issues, status=error.status)
    await core.readmodel.caught_up(cursor)
    return RedirectResponse("/deployments", status_code=303)


async def undeploy(request: Request) -> Response:
    await read_session_form(request)
    core, name = services(request), request.path_params["name"]
    _, cursor = await core.deployment_requests.undeploy(name, cause=cause_of(request, "undeploy"))
    await core.readmodel.caught_up(cursor)
    return RedirectResponse("/deployments", status_code=303)


async def _page(
    request: Request, fields: object, *, issues: tuple[Issue, ...] = (), status: int = 200
) -> Response:
    core = services(request)
    found = await core.readmodel.deployments.all_deployments()
    values = {
        "rows": [deployment_json(one) for one in found],
        "num_active": sum(one.is_active for one in found),
        "most": core.settings.serving.max_deployments,
        "fields": fields,
        "issues": issues,
    }
    return html(request, "deployments.html", values, status=status)


ROUTES = [
    PageRoute("/deployments", index, scope="read"),
    PageRoute("/deployments.json", rows, scope="read"),
    PageRoute("/deployments", deploy, scope="control", methods=["POST"]),
    PageRoute("/deployments/{name:path}/usage.json", deployments.show, scope="read"),
    PageRoute("/deployments/{name:path}/undeploy", undeploy, scope="control", methods=["POST"]),
    PageRoute("/deployments/{name:path}", show, scope="read"),
]
