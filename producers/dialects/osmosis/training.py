"""Training runs."""

from datetime import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.run_pages import RunFilter
from infra.readmodel.runs import RunJson
from producers.core.workspaces import Workspace
from producers.dialects.osmosis.requests import Wire, page_answer, page_of, services
from producers.dialects.osmosis.scope import in_workspace, route


class ListedModel(Wire):
    id: str
    model_name: str


class ListedDataset(Wire):
    id: str
    file_name: str


class NamedWire(Wire):
    """Something that a run uses."""

    id: str
    name: str


class TrainingRunWire(Wire):
    """The fields of a run itself, in lists and in details."""

    id: str
    name: str
    status: str
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    creator_name: str | None
    creator_email: str | None
    platform_url: str | None
    current_step: int | None
    total_steps: int | None
    reward: float | None


class ListedRun(TrainingRunWire):
    model: ListedModel
    dataset: ListedDataset
    rollout: NamedWire | None


async def index(request: Request, workspace: Workspace) -> Response:
    """Return a page of the workspace's runs, the newest first."""
    del workspace  # what is listed is that of the sender, who is within it
    page = page_of(request)
    runs, total = await services(request).readmodel.run_pages.at_offset(page, RunFilter())
    public_url = services(request).settings.public_url
    rows = [_list_item(run, public_url=public_url) for run in runs]
    return page_answer("training_runs", rows, total, page)


def _list_item(run: RunJson, *, public_url: str) -> ListedRun:
    rollout = run["rollout"]
    return ListedRun(
        **run_fields(run, public_url=public_url),
        model=ListedModel(id=run["model"], model_name=run["model"]),
        dataset=ListedDataset(id=run["dataset"], file_name=run["dataset"]),
        rollout=None if rollout is None else NamedWire(id=rollout, name=rollout),
    )


def run_fields(run: RunJson, *, public_url: str) -> dict[str, Any]:
    """The fields of TrainingRunWire for a run."""
    return {
        "id": run["id"],
        "name": run["name"],
        "status": run["status"],
        "created_at": run["created_at"],
        "started_at": run["started_at"],
        "completed_at": run["completed_at"],
        "creator_name": run["creator"],
        "creator_email": None,
        "platform_url": f"{public_url}/runs/{run['name']}",
        "current_step": run["current_step"],
        "total_steps": run["total_steps"],
        "reward": run["reward"],
    }


ROUTES = [route("/training-runs", in_workspace(index), scope="read")]
