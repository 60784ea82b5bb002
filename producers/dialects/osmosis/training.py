"""Training runs: submit, list, show, stop, and their checkpoints and logs."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infra.identity.people import Person
from infra.readmodel.run_pages import RunFilter
from infra.readmodel.runs import CheckpointJson, LogJson, RunJson
from producers.core.lookup import archived_error
from producers.core.submit import SubmitRequest
from producers.core.workspaces import Workspace
from producers.dialects.osmosis.requests import (
    MOST_LINES,
    Wire,
    answer,
    page_answer,
    page_of,
    read_body,
    services,
)
from producers.dialects.osmosis.scope import in_workspace, route
from producers.dialects.osmosis.submissions import (
    SubmittedWire,
    SubmitWire,
    refused_submission,
    secret_scopes,
)
from producers.http.auth import actor_of
from producers.http.requests import cause_of, idempotency_key, json_object
from producers.http.responses import number
from schemas.config import RunConfig
from schemas.deployments import checkpoint_name
from schemas.errors import Conflict, InvalidConfig, TransientError

SECTIONS = {
    "training_config": "training",
    "sampling_config": "sampling",
    "checkpoints_config": "checkpoints",
}
"""The sections of a training TOML besides those that every TOML has, by their names on the wire."""

NUM_SAMPLES = "rollout/num_samples"
"""The metric with the number of samples of a step."""


class SubmitTraining(SubmitWire):
    """The body of `train submit`: the sections of the TOML. They are checked as those of a TOML are, so
    here they may hold anything."""

    kind = "training"
    training_config: object = None
    sampling_config: object = None
    checkpoints_config: object = None


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


class ShownRun(TrainingRunWire):
    examples_processed_count: int | None
    notes: str | None


class TrainingRunDetail(Wire):
    training_run: ShownRun
    model: NamedWire
    dataset: NamedWire
    rollout: NamedWire | None
    config: dict[str, Any]
    entrypoint: str | None
    branch: str | None
    commit_sha: str | None
    env_config: dict[str, str]
    resolved_secret_scopes: dict[str, str]
    is_internal_user: bool = False


class CheckpointWire(Wire):
    id: str
    checkpoint_step: int
    status: str
    checkpoint_name: str
    created_at: datetime


class CheckpointList(Wire):
    training_run_name: str
    checkpoints: list[CheckpointWire]


class LogLine(Wire):
    timestamp: datetime
    level: str
    step: str
    message: str


class LogPage(Wire):
    logs: list[LogLine]
    next_cursor: str | None


class Stopped(Wire):
    id: str
    name: str
    status: str


async def submit(request: Request, workspace: Workspace) -> Response:
    """Submit a run of the TOML whose sections the body has."""
    body = await read_body(request, SubmitTraining)
    actor, core = actor_of(request), services(request)
    wanted = SubmitRequest(
        config=body.document(SECTIONS),
        workspace=workspace.id,
        submitter=actor.person,
        creator=actor.owner,
        given=body.secrets.values(),
    )
    try:
        recorded = await core.submitter.submit_run(wanted, key=idempotency_key(request))
    except InvalidConfig as error:
        raise await refused_submission(request, error, body, workspace) from error
    await core.readmodel.caught_up(recorded.cursor)
    run, _ = await find_run(request, recorded.event.run_id)
    submitted = SubmittedWire(
        id=run["id"],
        name=run["name"],
        status=run["status"],
        created_at=run["created_at"],
        platform_url=url_of_run(request, run),
    )
    return answer(submitted, status=201)


async def index(request: Request, workspace: Workspace) -> Response:
    """Return a page of the workspace's runs, the newest first."""
    del workspace  # the sender is within it, so that no other run is found
    page = page_of(request)
    runs, total = await services(request).readmodel.run_pages.at_offset(page, RunFilter())
    people = await creators_of(request, runs)
    rows = [_list_item(request, run, people) for run in runs]
    return page_answer("training_runs", rows, total, page)


async def show(request: Request, workspace: Workspace) -> Response:
    """Return a run, with its config and with the owners of the secrets that it uses."""
    run, text = await find_run(request, request.path_params["ref"])
    config = RunConfig.model_validate_json(text)
    requested = await services(request).lookup.run(run["id"])
    experiment, rollout = config.experiment, run["rollout"]
    samples = await services(request).readmodel.runs.total(run["id"], NUM_SAMPLES)
    shown = ShownRun(
        **run_fields(request, run, await creators_of(request, [run])),
        examples_processed_count=None if samples is None else int(samples),
        notes=run["note"],
    )
    return answer(
        TrainingRunDetail(
            training_run=shown,
            model=NamedWire(id=run["model"], name=run["model"]),
            dataset=NamedWire(id=run["dataset_id"], name=run["dataset"]),
            rollout=None if rollout is None else NamedWire(id=rollout, name=rollout),
            config=_flat_config(config),
            entrypoint=experiment.entrypoint,
            branch=experiment.branch,
            commit_sha=run["commit_sha"] or experiment.commit_sha,
            env_config=config.env,
            resolved_secret_scopes=await secret_scopes(
                request, config.secrets.required, workspace, submitter=requested.submitter
            ),
        )
    )


async def checkpoints(request: Request, workspace: Workspace) -> Response:
    """Return the checkpoints of a run, in order of step."""
    del workspace
    run, _ = await find_run(request, request.path_params["ref"])
    found = await services(request).readmodel.runs.checkpoints(run["id"])
    rows = [_checkpoint(run, one) for one in found]
    return answer(CheckpointList(training_run_name=run["name"], checkpoints=rows))


async def logs(request: Request, workspace: Workspace) -> Response:
    """Return a page of the log of a run, the oldest line first."""
    del workspace
    run, _ = await find_run_with_history(request, request.path_params["ref"])
    return await log_page(request, run["id"])


async def stop(request: Request, workspace: Workspace) -> Response:
    """Stop a run. A run that stops already, or that was stopped, is answered in the same way."""
    del workspace
    await json_object(request)
    ref = request.path_params["ref"]
    core = services(request)
    try:
        run, cursor = await core.control.run(
            "stop", ref, cause=cause_of(request, f"control/stop/{ref}")
        )
        await core.readmodel.caught_up(cursor)
    except Conflict:
        found, _ = await find_run(request, ref)
        if found["status"] != "stopped":
            raise
        run = found["id"]
    shown, _ = await find_run(request, run)
    return answer(Stopped(id=shown["id"], name=shown["name"], status=shown["status"]))


async def find_run(request: Request, ref: str) -> tuple[RunJson, str]:
    """A run of the workspace by name or id, and its config as JSON text. Raises NotFound, and
    TransientError while the read model does not have it yet."""
    core = services(request)
    found = await core.readmodel.runs.get_run(ref)
    if found is None:
        await core.lookup.run(ref)
        raise TransientError(f"run {ref} is not in the read model yet; try again")
    return found


async def find_run_with_history(request: Request, ref: str) -> tuple[RunJson, str]:
    """Like `find_run`, for what the history of a run says. Also raises Conflict when it is archived."""
    run, config = await find_run(request, ref)
    if run["archived_at"] is not None:
        raise archived_error(run["name"])
    return run, config


async def log_page(request: Request, owner: str) -> Response:
    """A page of the log of a run or an evaluation (its id). Raises InvalidConfig for a cursor or a
    direction that is not valid."""
    query = request.query_params
    direction = query.get("direction") or "older"
    if direction not in ("older", "newer"):
        raise InvalidConfig(f"direction must be older or newer, got {direction[:20]!r}")
    try:
        lines, following = await services(request).readmodel.runs.logs(
            owner,
            limit=number(request, "limit", default=50, least=1, most=MOST_LINES),
            cursor=query.get("cursor") or None,
            older=direction == "older",
        )
    except ValueError as error:
        raise InvalidConfig("cursor is not valid; use next_cursor of an answer") from error
    return answer(LogPage(logs=[_log_line(line) for line in lines], next_cursor=following))


async def creators_of(request: Request, runs: Sequence[RunJson]) -> Mapping[str, Person]:
    """The people who submitted runs, by their ids. Runs of API keys without a person have none."""
    creators = {run["creator"] for run in runs if run["creator"] is not None}
    return await services(request).people.find_all(creators) if creators else {}


def run_fields(request: Request, run: RunJson, people: Mapping[str, Person]) -> dict[str, Any]:
    """The fields of TrainingRunWire for a run. `people` are those who submitted runs."""
    creator = people.get(run["creator"] or "")
    return {
        "id": run["id"],
        "name": run["name"],
        "status": run["status"],
        "created_at": run["created_at"],
        "started_at": run["started_at"],
        "completed_at": run["completed_at"],
        "creator_name": run["creator"] if creator is None else creator.name,
        "creator_email": None if creator is None else creator.email,
        "platform_url": url_of_run(request, run),
        "current_step": run["current_step"],
        "total_steps": run["total_steps"],
        "reward": run["reward"],
    }


def url_of_run(request: Request, run: RunJson) -> str:
    """The page of a run on the dashboard."""
    return f"{services(request).settings.public_url}/runs/{run['id']}"


def _list_item(request: Request, run: RunJson, people: Mapping[str, Person]) -> ListedRun:
    rollout = run["rollout"]
    return ListedRun(
        **run_fields(request, run, people),
        model=ListedModel(id=run["model"], model_name=run["model"]),
        dataset=ListedDataset(id=run["dataset_id"], file_name=run["dataset"]),
        rollout=None if rollout is None else NamedWire(id=rollout, name=rollout),
    )


def _checkpoint(run: RunJson, checkpoint: CheckpointJson) -> CheckpointWire:
    step = checkpoint["step"]
    return CheckpointWire(
        id=f"{run['id']}@{step}",
        checkpoint_step=step,
        status="saved",
        checkpoint_name=checkpoint_name(run["name"], step),
        created_at=checkpoint["created_at"],
    )


def _log_line(line: LogJson) -> LogLine:
    step = line["step"]
    return LogLine(
        timestamp=line["timestamp"],
        level=line["level"],
        step="" if step is None else str(step),
        message=line["message"],
    )


def _flat_config(config: RunConfig) -> dict[str, Any]:
    """The keys of a run's config without their sections. Of [advanced] only those keys are in it whose
    values are not the defaults."""
    found = config.model_dump(mode="json")
    flat = {**found["training"], **found["sampling"], **found["checkpoints"]}
    defaults = RunConfig.model_fields["advanced"].default.model_dump(mode="json")
    advanced: Mapping[str, Any] = {
        key: value for key, value in found["advanced"].items() if value != defaults.get(key)
    }
    return {**flat, "model_path": config.experiment.model_path, **advanced}


ROUTES = [
    route("/training-runs", in_workspace(submit), scope="submit", methods=("POST",)),
    route("/training-runs", in_workspace(index), scope="read"),
    route("/training-runs/{ref}", in_workspace(show), scope="read"),
    route("/training-runs/{ref}/checkpoints", in_workspace(checkpoints), scope="read"),
    route("/training-runs/{ref}/logs", in_workspace(logs), scope="read"),
    route("/training-runs/{ref}/stop", in_workspace(stop), scope="control", methods=("POST",)),
]
