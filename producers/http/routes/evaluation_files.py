"""The figures of an evaluation, and its files."""

import json
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.registry import EvaluationJson
from infra.spine.ports.event_log import Cursor
from producers.core.evaluations.files import EvaluationFile, EvaluationFiles, Selection
from producers.core.evaluations.summary import EvaluationSummary, count_tokens, summarize
from producers.http.downloads import download
from producers.http.responses import ApiResponse
from producers.http.routes.evaluations import (
    find_evaluation,
    results_of,
    threshold_of,
    to_json,
)
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.artifact_refs import ArtifactRef
from schemas.events import EvaluationImported

LINES = 1000


async def summary(request: Request) -> Response:
    """The attempts of an evaluation by outcome, the spread of their rewards, pass@k and tokens."""
    found = await find_evaluation(request, request.path_params["ref"])
    return ApiResponse({"summary": await summary_json(request, found)})


async def files(request: Request) -> Response:
    """The files of an evaluation: those of some `types`, and of attempts those at some `rows`."""
    found = await find_evaluation(request, request.path_params["ref"])
    listed = await list_files(request, found)
    rows = [{"path": file.path, "size": file.size} for file in listed]
    return ApiResponse({"files": rows, "total_bytes": sum(file.size for file in listed)})


async def file(request: Request) -> Response:
    """One file of an evaluation."""
    found = await find_evaluation(request, request.path_params["ref"])
    built = await evaluation_files(request, found)
    return await _send(request, await built.find_file(request.path_params["path"]))


async def summary_of(request: Request, found: EvaluationJson) -> EvaluationSummary:
    """The figures of an evaluation so far."""
    config = json.loads(found["config"] or "{}")
    return summarize(
        await results_of(request, found),
        rows=found["total"],
        n=int(config.get("evaluation", {}).get("n", 1)),
        threshold=threshold_of(found),
        metrics=json.loads(found["metrics"]),
    )


async def summary_json(request: Request, found: EvaluationJson) -> Mapping[str, object]:
    """The figures of an evaluation with its tokens, as JSON."""
    figures = await summary_of(request, found)
    tokens = await count_tokens(services(request).log, found["id"])
    return {**figures.to_json(), "tokens": tokens}


async def list_files(request: Request, found: EvaluationJson) -> list[EvaluationFile]:
    """The files that the query of a request selects. Raises InvalidConfig."""
    query = request.query_params
    selection = Selection.parse(query.get("types"), query.get("rows"))
    return await (await evaluation_files(request, found)).list_files(selection)


async def evaluation_files(request: Request, found: EvaluationJson) -> EvaluationFiles:
    """The files of an evaluation."""
    return EvaluationFiles(
        services(request).artifacts,
        await results_of(request, found),
        figures={"eval": to_json(found), "summary": await summary_json(request, found)},
        log_lines=await _log_lines(request, found["id"]),
        logs=await _imported_logs(request, found["id"]),
    )


async def _imported_logs(request: Request, evaluation: str) -> ArtifactRef | None:
    """The log that an import brought along."""
    newest: ArtifactRef | None = None
    types = [EvaluationImported.type]
    found = await services(request).log.read(evaluation, after=Cursor(), limit=LINES, types=types)
    for recorded in found:
        if isinstance(recorded.event, EvaluationImported):
            newest = recorded.event.logs
    return newest


async def _log_lines(request: Request, evaluation: str) -> list[str]:
    """All lines of the log of an evaluation, the oldest first."""
    runs = services(request).readmodel.runs
    found: list[str] = []
    cursor: str | None = None
    while True:
        lines, cursor = await runs.logs(evaluation, limit=LINES, cursor=cursor, older=False)
        found += [
            f"{one['timestamp'].isoformat()} {one['level']} {one['message']}" for one in lines
        ]
        if len(lines) < LINES:
            return found


async def _send(request: Request, found: EvaluationFile) -> Response:
    if found.ref is not None:
        return await download(request, found.ref, found.path.rpartition("/")[2])
    headers = {"Content-Disposition": "attachment"}
    return Response(found.data, media_type="application/octet-stream", headers=headers)


ROUTES = [
    ScopedRoute("/evals/{ref}/summary", summary, scope="read"),
    ScopedRoute("/evals/{ref}/files", files, scope="read"),
    ScopedRoute("/evals/{ref}/files/{path:path}", file, scope="read"),
    ScopedRoute("/transfers/evals/{ref}/{path:path}", file, scope="open"),
]
