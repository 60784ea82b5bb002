"""Evaluations: submit, list, show, stop and retry, and their metrics and logs."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from infra.model_api.providers.endpoints import PROVIDERS
from infra.readmodel.registry import EvaluationJson
from producers.core.control import ImportedElsewhere
from producers.core.evaluations.summary import EvaluationSummary, count_tokens
from producers.core.submit import SubmitRequest
from producers.core.validation.given_secrets import SecretsNotSet
from producers.core.workspaces import Workspace
from producers.dialects.osmosis.errors import ClientRefused
from producers.dialects.osmosis.requests import (
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
from producers.dialects.osmosis.training import NamedWire, Stopped, log_page
from producers.http.auth import actor_of
from producers.http.requests import cause_of, idempotency_key, json_object
from producers.http.routes.evaluation_files import summary_of
from producers.http.routes.evaluations import find_evaluation, repeat_attempts
from schemas.config import EvalAdvanced, EvalConfig
from schemas.errors import InvalidConfig
from schemas.sampling import PROVIDER_PREFIX
from schemas.secrets.secret_value import SecretValue
from schemas.specs import DatasetRef

SECTIONS = {"evaluation_config": "evaluation"}
"""The section of an evaluation TOML besides those that every TOML has, by its name on the wire."""


class SubmitEvaluation(SubmitWire):
    """The body of `eval submit`: the sections of the TOML."""

    kind = "evaluation"
    evaluation_config: object = None

    def eval_document(self) -> Mapping[str, object]:
        """The document of the TOML. Its author names the model of a provider as LiteLLM does, without a
        prefix, and requires the secret with the provider's key. Without that secret the same text is a
        model of the hub, where there are names like these too."""
        document = self.document(SECTIONS)
        experiment = document.get("experiment")
        if not isinstance(experiment, dict):
            return document
        path = str(experiment.get("model_path"))
        provider = PROVIDERS.get(path.partition("/")[0])
        if provider is None or provider.secret not in self.secrets.required:
            return document
        return {**document, "experiment": {**experiment, "model_path": PROVIDER_PREFIX + path}}


class NamedOnly(Wire):
    """Something that an evaluation uses."""

    name: str


class EvaluationWire(Wire):
    """The fields of an evaluation itself, in lists and in details."""

    id: str
    name: str
    status: str
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    creator_name: str | None = None
    creator_email: str | None = None
    platform_url: str | None


class SpreadWire(Wire):
    mean: float
    std: float
    min: float
    median: float
    max: float


class SpreadWithPasses(SpreadWire):
    pass_at_k: dict[str, float]


class ListedResults(Wire):
    """The results that are known without reading the attempts."""

    score: float | None
    pass_rate: float | None
    sampled_rows: int


class ListedEvaluation(EvaluationWire):
    model: NamedOnly
    dataset: NamedOnly
    rollout: NamedOnly | None
    results: ListedResults
    config: dict[str, Any]


class ResultsWire(ListedResults):
    """`total_runs` counts the attempts that were made, `skipped` those that were not."""

    graded: int
    passed: int
    failed: int
    skipped: int
    total_runs: int
    total_dataset_rows: int
    pass_threshold: float
    total_tokens: int
    resumed_count: int = 0
    reward_stats: SpreadWithPasses | None


class EvaluationDetail(Wire):
    eval_run: EvaluationWire
    dataset: NamedWire
    rollout: NamedWire | None
    config: dict[str, Any]
    results: ResultsWire
    entrypoint: str | None
    branch: str | None
    commit_sha: str | None
    env_config: dict[str, str]
    resolved_secret_scopes: dict[str, str]
    dataset_df_stats: None = None
    is_internal_user: bool = False


class OverviewWire(Wire):
    duration_ms: int | None
    total_samples: int
    completed_samples: int
    graded: int
    passed: int
    failed: int
    skipped: int
    pass_rate: float | None
    pass_threshold: float
    tokens_used: int


class PassAtK(Wire):
    k: int
    value: float


class EvaluationMetrics(Wire):
    status: str
    overview: OverviewWire
    reward_stats: SpreadWire | None
    pass_at_k: list[PassAtK]


class RetryEvaluation(Wire):
    """The body of `eval retry`: values of secrets for this retry alone."""

    secrets: dict[str, str] = Field(default={}, repr=False)

    def values(self) -> Mapping[str, SecretValue]:
        """The values that are given, which nothing prints."""
        return {name: SecretValue(value) for name, value in self.secrets.items()}


class Retried(Wire):
    id: str
    name: str
    status: str
    workflow_id: str
    retryable_samples: int
    platform_url: str | None


async def submit(request: Request, workspace: Workspace) -> Response:
    """Submit an evaluation of the TOML whose sections the body has."""
    body = await read_body(request, SubmitEvaluation)
    actor, core = actor_of(request), services(request)
    wanted = SubmitRequest(
        config=body.eval_document(),
        workspace=workspace.id,
        submitter=actor.person,
        creator=actor.owner,
        given=body.secrets.values(),
    )
    try:
        recorded = await core.submitter.submit_eval(wanted, key=idempotency_key(request))
    except InvalidConfig as error:
        raise await refused_submission(request, error, body, workspace) from error
    await core.readmodel.caught_up(recorded.cursor)
    found = await find_evaluation(request, recorded.event.run_id)
    submitted = SubmittedWire(
        id=found["id"],
        name=found["name"],
        status=found["status"],
        created_at=found["created_at"],
        platform_url=_url_of(request, found),
    )
    return answer(submitted, status=201)


async def index(request: Request, workspace: Workspace) -> Response:
    """Return a page of the workspace's evaluations, the newest first."""
    del workspace  # the sender is within it, so that no other evaluation is found
    page = page_of(request)
    found, total = await services(request).readmodel.evaluations.page(page)
    return page_answer("eval_runs", [_list_item(request, one) for one in found], total, page)


async def show(request: Request, workspace: Workspace) -> Response:
    """Return an evaluation, with its config and its results so far."""
    found = await find_evaluation(request, request.path_params["ref"])
    requested = await services(request).lookup.evaluation(found["id"])
    config = _config_of(found)
    rollout = found["rollout"]
    return answer(
        EvaluationDetail(
            eval_run=EvaluationWire(**_fields(request, found)),
            dataset=NamedWire(id=found["dataset_id"], name=found["dataset"]),
            rollout=None if rollout is None else NamedWire(id=rollout, name=rollout),
            config=_flat_config(config),
            results=await _results(request, found),
            entrypoint=config.experiment.entrypoint if config else None,
            branch=config.experiment.branch if config else None,
            commit_sha=config.experiment.commit_sha if config else None,
            env_config=config.env if config else {},
            resolved_secret_scopes=await secret_scopes(
                request,
                config.secrets.required if config else (),
                workspace,
                submitter=requested.submitter,
            ),
        )
    )


async def metrics(request: Request, workspace: Workspace) -> Response:
    """Return the figures of an evaluation so far."""
    del workspace
    found = await find_evaluation(request, request.path_params["ref"])
    figures = await summary_of(request, found)
    overview = OverviewWire(
        duration_ms=_duration_ms(found),
        total_samples=figures.attempts,
        completed_samples=figures.attempts - figures.skipped,
        graded=figures.graded,
        passed=figures.passed,
        failed=figures.failed,
        skipped=figures.skipped,
        pass_rate=figures.pass_rate,
        pass_threshold=figures.pass_threshold,
        tokens_used=await count_tokens(services(request).log, found["id"]),
    )
    return answer(
        EvaluationMetrics(
            status=found["status"],
            overview=overview,
            reward_stats=SpreadWire(**_spread(figures)) if figures.rewards else None,
            pass_at_k=[PassAtK(k=k, value=value) for k, value in figures.pass_at_k.items()],
        )
    )


async def logs(request: Request, workspace: Workspace) -> Response:
    """Return a page of the log of an evaluation, the oldest line first."""
    del workspace
    found = await find_evaluation(request, request.path_params["ref"])
    return await log_page(request, found["id"])


async def stop(request: Request, workspace: Workspace) -> Response:
    """Stop an evaluation. One that was stopped before is answered in the same way."""
    del workspace
    await json_object(request)
    ref, core = request.path_params["ref"], services(request)
    found = await find_evaluation(request, ref)
    if found["status"] != "stopped":
        cause = cause_of(request, f"control/stop-evaluation/{ref}")
        evaluation, cursor = await core.control.stop_evaluation(found["id"], cause=cause)
        await core.readmodel.caught_up(cursor)
        found = await find_evaluation(request, evaluation)
    return answer(Stopped(id=found["id"], name=found["name"], status=found["status"]))


async def retry(request: Request, workspace: Workspace) -> Response:
    """Repeat the attempts that were left out. The body may give secrets for this retry alone. A refusal
    names those that are neither given nor set, so that the client asks for them and tries again."""
    del workspace
    body = await read_body(request, RetryEvaluation)
    try:
        found, retryable = await repeat_attempts(
            request, request.path_params["ref"], given=body.values()
        )
    except SecretsNotSet as error:
        names = {"run_secret_names": list(error.names)}
        raise ClientRefused(400, "VALIDATION", error.message, fields=names) from error
    except ImportedElsewhere as error:
        where = {"config_path": error.config_path, "eval_run_name": error.local_name}
        raise ClientRefused(409, error.code, error.message, fields={"local_run": where}) from error
    return answer(
        Retried(
            id=found["id"],
            name=found["name"],
            status=found["status"],
            workflow_id=found["id"],
            retryable_samples=retryable,
            platform_url=_url_of(request, found),
        )
    )


async def _results(request: Request, found: EvaluationJson) -> ResultsWire:
    figures = await summary_of(request, found)
    passes = {str(k): value for k, value in figures.pass_at_k.items()}
    spread = SpreadWithPasses(**_spread(figures), pass_at_k=passes) if figures.rewards else None
    return ResultsWire(
        score=figures.reward,
        pass_rate=figures.pass_rate,
        sampled_rows=figures.rows,
        graded=figures.graded,
        passed=figures.passed,
        failed=figures.failed,
        skipped=figures.skipped,
        total_runs=figures.attempts - figures.skipped,
        total_dataset_rows=DatasetRef.model_validate_json(found["dataset_ref"]).num_rows,
        pass_threshold=figures.pass_threshold,
        total_tokens=await count_tokens(services(request).log, found["id"]),
        reward_stats=spread,
    )


def _spread(figures: EvaluationSummary) -> dict[str, float]:
    """The spread of the rewards, as fields of SpreadWire."""
    found = figures.rewards
    if found is None:
        return {}
    return {name: getattr(found, name) for name in SpreadWire.model_fields}


def _list_item(request: Request, found: EvaluationJson) -> ListedEvaluation:
    figures: Mapping[str, float] = json.loads(found["metrics"])
    rollout = found["rollout"]
    return ListedEvaluation(
        **_fields(request, found),
        model=NamedOnly(name=found["model"]),
        dataset=NamedOnly(name=found["dataset"]),
        rollout=None if rollout is None else NamedOnly(name=rollout),
        results=ListedResults(
            score=found["reward"],
            pass_rate=figures.get("eval/pass_rate"),
            sampled_rows=found["total"],
        ),
        config=_flat_config(_config_of(found)),
    )


def _fields(request: Request, found: EvaluationJson) -> dict[str, Any]:
    """The fields of EvaluationWire."""
    return {
        "id": found["id"],
        "name": found["name"],
        "status": found["status"],
        "created_at": found["created_at"],
        "started_at": found["started_at"],
        "completed_at": found["completed_at"],
        "platform_url": _url_of(request, found),
    }


def _config_of(found: EvaluationJson) -> EvalConfig | None:
    text = found["config"]
    return EvalConfig.model_validate_json(text) if text else None


def _flat_config(config: EvalConfig | None) -> dict[str, Any]:
    """The keys of an evaluation's config without their sections. Of [advanced] only those keys are in
    it whose values are not the defaults."""
    if config is None:
        return {}
    defaults = EvalAdvanced().model_dump(mode="json")
    advanced = config.advanced.model_dump(mode="json")
    changed = {key: value for key, value in advanced.items() if value != defaults.get(key)}
    evaluation = config.evaluation.model_dump(mode="json")
    return {**evaluation, "model_path": config.experiment.model_path, **changed}


def _duration_ms(found: EvaluationJson) -> int | None:
    """How long an evaluation took, or has taken so far. None before it starts."""
    if found["started_at"] is None:
        return None
    end = found["completed_at"] or datetime.now(UTC)
    return int((end - found["started_at"]).total_seconds() * 1000)


def _url_of(request: Request, found: EvaluationJson) -> str:
    """The page of an evaluation on the dashboard."""
    return f"{services(request).settings.public_url}/evals/{found['id']}"


ROUTES = [
    route("/eval-runs", in_workspace(submit), scope="submit", methods=("POST",)),
    route("/eval-runs", in_workspace(index), scope="read"),
    route("/eval-runs/{ref}", in_workspace(show), scope="read"),
    route("/eval-runs/{ref}/metrics", in_workspace(metrics), scope="read"),
    route("/eval-runs/{ref}/logs", in_workspace(logs), scope="read"),
    route("/eval-runs/{ref}/stop", in_workspace(stop), scope="control", methods=("POST",)),
    route("/eval-runs/{ref}/retry", in_workspace(retry), scope="control", methods=("POST",)),
]
