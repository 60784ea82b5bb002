"""The rollouts that were found in the repository of a workspace."""

from datetime import datetime

from starlette.requests import Request
from starlette.responses import Response

from producers.core.validation.synced_rollouts import SyncedRollout
from producers.core.workspaces import Workspace
from producers.dialects.osmosis.requests import Wire, page_answer, page_of, services
from producers.dialects.osmosis.scope import in_workspace, route


class RolloutWire(Wire):
    id: str
    name: str
    description: str | None
    last_synced_at: datetime
    last_synced_commit_sha: str
    repo_full_name: str | None
    created_at: datetime


async def index(request: Request, workspace: Workspace) -> Response:
    """Return a page of the rollouts of a branch, or of the default one, by name."""
    page = page_of(request)
    branch = request.query_params.get("branch") or None
    found = await services(request).rollouts.find(workspace, branch)
    by_name = {one.name: one for one in reversed(found)}
    names = sorted(by_name)[page.offset : page.offset + page.limit]
    rows = [_rollout(by_name[name], workspace) for name in names]
    return page_answer("rollouts", rows, len(by_name), page)


def _rollout(rollout: SyncedRollout, workspace: Workspace) -> RolloutWire:
    return RolloutWire(
        id=rollout.name,
        name=rollout.name,
        description=rollout.found.error or rollout.found.workflow,
        last_synced_at=rollout.synced_at,
        last_synced_commit_sha=rollout.commit,
        repo_full_name=workspace.repository,
        created_at=rollout.created_at,
    )


ROUTES = [route("/rollouts", in_workspace(index), scope="read")]
