"""The workspaces that the client offers, and what its `quickstart` asks about one."""

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from infra.ports.actor import narrowed_to
from infra.readmodel.run_pages import RunFilter
from infra.readmodel.runs import PageRange
from producers.core.workspaces import Workspace
from producers.dialects.osmosis.requests import Wire, answer, read_body, services
from producers.dialects.osmosis.scope import route
from schemas.errors import InvalidConfig, Issue

ORGANISATION = "organizationId"
"""The parameter with the id of a workspace. The client calls workspaces organisations here."""


class RepositoryWire(Wire):
    repo_full_name: str


class WorkspaceWire(Wire):
    id: str
    name: str
    connected_repo: RepositoryWire | None


class WorkspacesWire(Wire):
    workspaces: list[WorkspaceWire]


class QuickstartRepository(Wire):
    connected: bool
    full_name: str | None


class Quickstart(Wire):
    repo: QuickstartRepository
    billing_ready: bool
    completed: bool


class CompleteQuickstart(Wire):
    workspace: str = Field(alias="organizationId")
    intent: str


async def index(request: Request) -> Response:
    """Return the workspaces that the sender sees."""
    found = await services(request).workspaces.visible()
    return answer(WorkspacesWire(workspaces=[_workspace(one) for one in found]))


async def show_quickstart(request: Request) -> Response:
    """Return how far a workspace is set up. It is completed when it has a run. Nothing is billed."""
    ref = request.query_params.get(ORGANISATION)
    if not ref:
        message = "is missing; it must be the id of a workspace"
        raise InvalidConfig(f"{ORGANISATION} {message}", issues=(Issue(ORGANISATION, message),))
    return answer(await _quickstart_of(request, ref))


async def complete_quickstart(request: Request) -> Response:
    """Return the same again: a workspace is completed by its first run, and not by this request."""
    body = await read_body(request, CompleteQuickstart)
    return answer(await _quickstart_of(request, body.workspace))


async def _quickstart_of(request: Request, ref: str) -> Quickstart:
    core = services(request)
    workspace = await core.workspaces.find_workspace(ref)
    with narrowed_to(workspace.id, workspace.organisation):
        _, runs = await core.readmodel.run_pages.at_offset(PageRange(limit=1), RunFilter())
    repository = workspace.repository
    return Quickstart(
        repo=QuickstartRepository(connected=repository is not None, full_name=repository),
        billing_ready=True,
        completed=runs > 0,
    )


def _workspace(workspace: Workspace) -> WorkspaceWire:
    repository = workspace.repository
    return WorkspaceWire(
        id=workspace.id,
        name=workspace.name,
        connected_repo=None if repository is None else RepositoryWire(repo_full_name=repository),
    )


ROUTES = [
    route("/workspaces", index, scope="read"),
    route("/quickstart", show_quickstart, scope="read"),
    route("/quickstart", complete_quickstart, scope="read", methods=("POST",)),
]
