"""Evaluations: the list, and one with its metrics and rows."""

import json

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.estimates import figures_in_order, interval_of
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import page_of
from producers.http.routes import evaluations
from producers.http.routes.evaluations import find_evaluation, results_of, to_json
from producers.http.routes.runs import services


async def index(request: Request) -> Response:
    page = page_of(request)
    rows, total = await services(request).readmodel.evaluations.page(page)
    shown = [
        {**to_json(row), "interval": interval_of(json.loads(row["metrics"]), "eval/reward")}
        for row in rows
    ]
    values = {"rows": shown, "total": total, "page": page}
    return html(request, "evaluations.html", values)


async def show(request: Request) -> Response:
    found = await find_evaluation(request, request.path_params["ref"])
    page = page_of(request)
    results = await results_of(request, found)
    shown = results[page.offset : page.offset + page.limit]
    return html(
        request,
        "evaluation.html",
        {
            "evaluation": to_json(found),
            "figures": figures_in_order(json.loads(found["metrics"])),
            "rows": [result.to_json() for result in shown],
            "config": json.dumps(json.loads(found["config"] or "{}"), indent=2, ensure_ascii=False),
            "total": len(results),
            "page": page,
        },
    )


ROUTES = [
    PageRoute("/evals", index, scope="read"),
    PageRoute("/evals.json", evaluations.index, scope="read"),
    PageRoute("/evals/{ref}", show, scope="read"),
    PageRoute("/evals/{ref}/rows.json", evaluations.rows, scope="read"),
]
