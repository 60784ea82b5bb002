"""Evaluations: submit, list, show, stop."""

import json
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.registry import EvaluationJson
from producers.http.auth import actor_of
from producers.http.requests import body_of, cause_of, idempotency_key
from producers.http.responses import ApiResponse, page_of, page_response
from producers.http.routes.runs import log_page, request_from, services, warnings_of
from producers.http.routes.samples import sample_page
from producers.http.routing import ScopedRoute
from schemas.errors import TransientError


def to_json(evaluation: EvaluationJson) -> Mapping[str, object]:
    """An evaluation as JSON. `completed` of `total` rows are graded."""
    values: dict[str, object] = dict(evaluation)
    del values["dataset_ref"]
    config = evaluation["config"]
    return {
        **values,
        "metrics": json.loads(evaluation["metrics"]),
        "config": json.loads(config) if config else None,
    }


async def submit(request: Request) -> Response:
    body = await body_of(request, ("config", "workspace", "name"))
    core = services(request)
    wanted = request_from(body, actor_of(request))
    recorded = await core.submitter.submit_eval(wanted, key=idempotency_key(request))
    await core.readmodel.caught_up(recorded.cursor)
    found = await _find(request, recorded.event.run_id)
    return ApiResponse(
        {"eval": to_json(found), "warnings": warnings_of(recorded.event)}, status_code=201
    )


async def index(request: Request) -> Response:
    page = page_of(request)
    rows, total = await services(request).readmodel.evaluations.page(page)
    return page_response("evals", [to_json(row) for row in rows], total, page)


async def show(request: Request) -> Response:
    return ApiResponse({"eval": to_json(await _find(request, request.path_params["ref"]))})


async def logs(request: Request) -> Response:
    found = await _find(request, request.path_params["ref"])
    return await log_page(request, found["id"])


async def samples(request: Request) -> Response:
    found = await _find(request, request.path_params["ref"])
    return await sample_page(request, found["id"], "evaluate", found["dataset_ref"])


async def stop(request: Request) -> Response:
    ref = request.path_params["ref"]
    await body_of(request, ())
    core = services(request)
    evaluation, cursor = await core.control.stop_evaluation(
        ref, cause=cause_of(request, f"control/stop-evaluation/{ref}")
    )
    await core.readmodel.caught_up(cursor)
    return ApiResponse({"eval": to_json(await _find(request, evaluation))})


async def _find(request: Request, ref: str) -> EvaluationJson:
    found = await services(request).readmodel.evaluations.get(ref)
    if found is None:
        await services(request).lookup.evaluation(ref)
        raise TransientError(f"evaluation {ref} is not in the read model yet; try again")
    return found


ROUTES = [
    ScopedRoute("/evals", submit, scope="submit", methods=["POST"]),
    ScopedRoute("/evals", index, scope="read"),
    ScopedRoute("/evals/{ref}", show, scope="read"),
    ScopedRoute("/evals/{ref}/logs", logs, scope="read"),
    ScopedRoute("/evals/{ref}/samples", samples, scope="read"),
    ScopedRoute("/evals/{ref}/stop", stop, scope="control", methods=["POST"]),
]
