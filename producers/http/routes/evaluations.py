"""Evaluations: submit, list, show, stop, retry, and their results by row."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.evaluation_results import (
    AttemptResult,
    Change,
    RowResult,
    compare_rows,
    find_caveats,
    num_left_out,
    paired_differences,
    results_by_row,
    select_attempts,
)
from infra.readmodel.registry import EvaluationJson
from producers.core.control import NO_SECRETS, ImportedElsewhere
from producers.http.auth import actor_of
from producers.http.requests import body_of, cause_of, idempotency_key
from producers.http.responses import ApiResponse, flag, number, page_of, page_response, project_of
from producers.http.routes.runs import log_page, request_from, services, warnings_of
from producers.http.routes.samples import (
    judgements_json,
    read_batch,
    read_judgements,
    read_rows,
    sample_detail,
    sample_file,
    sample_json,
)
from producers.http.routing import ScopedRoute
from schemas.datasets import DatasetRow
from schemas.errors import Conflict, TransientError
from schemas.events import EvaluationImported
from schemas.sampling import Judgement, SampleRecord
from schemas.secrets.secret_value import SecretValue
from schemas.specs import DatasetRef

ENDED = ("finished", "failed", "stopped")
MAX_ROW = 2**31 - 1


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
    body = await body_of(request, ("config", "workspace", "name", "secrets"))
    core = services(request)
    wanted = request_from(body, actor_of(request))
    recorded = await core.submitter.submit_eval(wanted, key=idempotency_key(request))
    await core.readmodel.caught_up(recorded.cursor)
    found = await find_evaluation(request, recorded.event.run_id)
    return ApiResponse(
        {"eval": to_json(found), "warnings": warnings_of(recorded.event)}, status_code=201
    )


async def index(request: Request) -> Response:
    page = page_of(request)
    rows, total = await services(request).readmodel.evaluations.page(page, project_of(request))
    return page_response("evals", [to_json(row) for row in rows], total, page)


async def show(request: Request) -> Response:
    """An evaluation. `imported` says where an imported one was made, and is null for all others."""
    found = await find_evaluation(request, request.path_params["ref"])
    event = await services(request).lookup.find_import(found["id"])
    imported = None if event is None else import_json(event)
    return ApiResponse({"eval": to_json(found), "imported": imported})


def import_json(event: EvaluationImported) -> Mapping[str, object]:
    """Where an imported evaluation was made, as JSON."""
    names = {"number", "importer", "local_run", "content_sha256"}
    return event.model_dump(mode="json", include=names)


async def logs(request: Request) -> Response:
    found = await find_evaluation(request, request.path_params["ref"])
    return await log_page(request, found["id"])


async def samples(request: Request) -> Response:
    """A page of the attempts, or of those at one `row`, those that are `failed` (without a reward), or
    those that are `not_passed`."""
    found = await find_evaluation(request, request.path_params["ref"])
    page = page_of(request)
    row = number(request, "row", default=-1, least=0, most=MAX_ROW)
    attempts = select_attempts(
        await results_of(request, found),
        row=None if row < 0 else row,
        only_failed=flag(request, "failed"),
        only_not_passed=flag(request, "not_passed"),
    )
    shown = attempts[page.offset : page.offset + page.limit]
    return page_response("samples", await _samples(request, found, shown), len(attempts), page)


async def sample(request: Request) -> Response:
    """One attempt, turn by turn, with what its user code left behind."""
    found = await find_evaluation(request, request.path_params["ref"])
    return await sample_detail(request, found["id"], found["dataset_ref"])


async def sample_files(request: Request) -> Response:
    """A file that the workflow of an attempt left behind."""
    found = await find_evaluation(request, request.path_params["ref"])
    return await sample_file(request, found["id"])


async def _samples(
    request: Request, found: EvaluationJson, attempts: Sequence[AttemptResult]
) -> list[Mapping[str, object]]:
    groups = {attempt.group.group: attempt.group for attempt in attempts}
    rows = await read_rows(request, found["dataset_ref"], list(groups.values()))
    records: dict[tuple[str, int], SampleRecord] = {}
    judged: dict[str, tuple[Judgement, ...]] = {}
    for group in groups.values():
        batch = await read_batch(request, group)
        judged[group.group] = await read_judgements(request, group)
        records |= {(group.group, record.index): record for record in batch.samples}
    listed: list[Mapping[str, object]] = []
    for attempt in attempts:
        missing = SampleRecord(index=attempt.index)
        record = records.get((attempt.group.group, attempt.index), missing)
        row = rows.get(attempt.group.dataset_row, DatasetRow(prompt=()))
        values = sample_json(attempt.group, record, row, attempt.grade)
        scores = judgements_json(judged[attempt.group.group], attempt.index)
        listed.append({**values, "attempt": attempt.number, "judgements": scores})
    return listed


async def rows(request: Request) -> Response:
    """A page of the rows, with the rewards of all attempts at each."""
    found = await find_evaluation(request, request.path_params["ref"])
    page = page_of(request)
    results = await results_of(request, found)
    shown = results[page.offset : page.offset + page.limit]
    return page_response("rows", [result.to_json() for result in shown], len(results), page)


async def compare(request: Request) -> Response:
    """Two evaluations of one dataset: their metrics, and each row with what changed."""
    first = await find_evaluation(request, request.path_params["ref"])
    second = await find_evaluation(request, request.path_params["other"])
    return ApiResponse(await compare_evaluations(request, first, second))


async def compare_evaluations(
    request: Request, first: EvaluationJson, second: EvaluationJson
) -> Mapping[str, object]:
    """The comparison of two evaluations as JSON. An attempt of either passes at the threshold of the
    first. Raises Conflict when their datasets differ."""
    contents = {
        DatasetRef.model_validate_json(e["dataset_ref"]).content.sha256 for e in (first, second)
    }
    if len(contents) > 1:
        raise Conflict(
            f"evaluations {first['name']} and {second['name']} have different rows, of "
            f"{first['dataset']} and {second['dataset']}; compare evaluations of one dataset"
        )
    metrics = [json.loads(e["metrics"]) for e in (first, second)]
    keys = sorted({key for each in metrics for key in each})
    thresholds = [threshold_of(e) for e in (first, second)]
    results = [await results_of(request, e, threshold=thresholds[0]) for e in (first, second)]
    changed = list(compare_rows(*results))
    counts = Counter(str(row["change"]) for row in changed)
    return {
        "evals": [to_json(first), to_json(second)],
        "metrics": [{"key": key, "values": [each.get(key) for each in metrics]} for key in keys],
        "caveats": find_caveats(
            [first["name"], second["name"]],
            results,
            thresholds=thresholds,
            is_ended=[e["status"] in ENDED for e in (first, second)],
        ),
        "differences": paired_differences(*results),
        "counts": {change: counts[change] for change in get_args(Change)},
        "rows": changed,
    }


async def retry(request: Request) -> Response:
    """Repeat the attempts that were left out."""
    body = await body_of(request, ("secrets",))
    found, retryable = await repeat_attempts(
        request, request.path_params["ref"], given=body.secrets("secrets")
    )
    return ApiResponse({"eval": to_json(found), "retryable_samples": retryable})


async def repeat_attempts(
    request: Request, ref: str, *, given: Mapping[str, SecretValue] = NO_SECRETS
) -> tuple[EvaluationJson, int]:
    """Repeat the attempts of an evaluation that were left out, with the values of secrets that were
    given to it alone. Returns the evaluation and how many these are. Raises NotFound, and Conflict when
    there are none."""
    core = services(request)
    before = await find_evaluation(request, ref)
    if (imported := await core.lookup.find_import(before["id"])) is not None:
        raise ImportedElsewhere(imported)
    config = json.loads(before["config"] or "{}")
    n = int(config.get("evaluation", {}).get("n", 1))
    retryable = num_left_out(await results_of(request, before), num_rows=before["total"], n=n)
    if before["status"] in ENDED and retryable == 0:
        raise Conflict(
            f"every attempt of evaluation {before['name']} counts; there is nothing to repeat"
        )
    evaluation, cursor = await core.control.retry_evaluation(before["id"], given=given)
    await core.readmodel.caught_up(cursor)
    return await find_evaluation(request, evaluation), retryable


async def results_of(
    request: Request, found: EvaluationJson, *, threshold: float | None = None
) -> list[RowResult]:
    """The results by row, with the evaluation's own threshold unless another is given. They are computed
    in a thread, because an evaluation may have many."""
    if threshold is None:
        threshold = threshold_of(found)
    groups = await services(request).readmodel.evaluations.groups(found["id"])
    return await asyncio.to_thread(results_by_row, groups, threshold=threshold)


def threshold_of(found: EvaluationJson) -> float:
    """The reward at which an attempt passes."""
    config = json.loads(found["config"] or "{}")
    return float(config.get("evaluation", {}).get("pass_threshold", 1.0))


async def stop(request: Request) -> Response:
    ref = request.path_params["ref"]
    await body_of(request, ())
    core = services(request)
    evaluation, cursor = await core.control.stop_evaluation(
        ref, cause=cause_of(request, f"control/stop-evaluation/{ref}")
    )
    await core.readmodel.caught_up(cursor)
    return ApiResponse({"eval": to_json(await find_evaluation(request, evaluation))})


async def find_evaluation(request: Request, ref: str) -> EvaluationJson:
    """The evaluation with this id or name. Raises NotFound, and TransientError while the read model does
    not have it yet."""
    found = await services(request).readmodel.evaluations.get_evaluation(ref)
    if found is None:
        await services(request).lookup.evaluation(ref)
        raise TransientError(f"evaluation {ref} is not in the read model yet; try again")
    return found


async def delete(request: Request) -> Response:
    evaluation = await services(request).retention.delete_evaluation(request.path_params["ref"])
    return ApiResponse({"deleted": evaluation})


ROUTES = [
    ScopedRoute("/evals", submit, scope="submit", methods=["POST"]),
    ScopedRoute("/evals", index, scope="read"),
    ScopedRoute("/evals/{ref}", show, scope="read"),
    ScopedRoute("/evals/{ref}", delete, scope="control", methods=["DELETE"]),
    ScopedRoute("/evals/{ref}/logs", logs, scope="read"),
    ScopedRoute("/evals/{ref}/samples", samples, scope="read"),
    ScopedRoute("/evals/{ref}/samples/{sample}", sample, scope="read"),
    ScopedRoute("/evals/{ref}/samples/{sample}/files/{name:path}", sample_files, scope="read"),
    ScopedRoute("/evals/{ref}/rows", rows, scope="read"),
    ScopedRoute("/evals/{ref}/compare/{other}", compare, scope="read"),
    ScopedRoute("/evals/{ref}/retry", retry, scope="control", methods=["POST"]),
    ScopedRoute("/evals/{ref}/stop", stop, scope="control", methods=["POST"]),
]
