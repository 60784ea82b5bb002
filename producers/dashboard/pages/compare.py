"""Several runs beside each other: their curves, and the settings that differ."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.runs import RunJson
from producers.dashboard.charts import finite_points
from producers.dashboard.overlay import overlay
from producers.dashboard.pages.run import SVG_POINTS, TITLES
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import ApiResponse
from producers.http.routes.runs import services
from schemas.errors import InvalidConfig, Issue, NotFound

MOST_RUNS = 8
DRAWN_POINTS = 400


async def show(request: Request) -> Response:
    found = await _runs(request)
    runs = services(request).readmodel.runs
    charts = []
    thinned = [
        await runs.sampled_curves(run["id"], list(TITLES), most=SVG_POINTS) for run, _ in found
    ]
    for key, title in TITLES.items():
        curves = [one.get(key, []) for one in thinned]
        if any(len(points) > 1 for points in curves):
            charts.append({"key": key, "title": title, "lines": overlay(curves)})
    return html(
        request,
        "compare.html",
        {
            "runs": [run for run, _ in found],
            "charts": charts,
            "differences": differences([config for _, config in found]),
            "names": ",".join(run["name"] for run, _ in found),
        },
    )


async def points(request: Request) -> Response:
    """The curves of the runs as JSON, by run and metric."""
    runs = services(request).readmodel.runs
    shown: dict[str, dict[str, object]] = {}
    for run, _ in await _runs(request):
        curves = await runs.thinned_curves(run["id"], list(TITLES), most=DRAWN_POINTS)
        shown[run["name"]] = {key: finite_points(curves.get(key, ())) for key in TITLES}
    return ApiResponse({"runs": shown})


async def _runs(request: Request) -> Sequence[tuple[RunJson, Mapping[str, Any]]]:
    """The runs that `runs` names, with their configs. Raises NotFound and InvalidConfig."""
    names = [name for name in request.query_params.get("runs", "").split(",") if name]
    names += request.query_params.getlist("run")
    names = list(dict.fromkeys(names))
    if not 1 < len(names) <= MOST_RUNS:
        message = (
            f"must name 2 to {MOST_RUNS} different runs with commas between them, got {len(names)}"
        )
        raise InvalidConfig(f"runs {message}", issues=(Issue("runs", message),))
    found = []
    for name in names:
        row = await services(request).readmodel.runs.get(name)
        if row is None:
            raise NotFound(f"there is no run {name[:200]!r}; the list of runs shows all")
        found.append((row[0], json.loads(row[1])))
    return found


def differences(
    configs: Sequence[Mapping[str, Any]],
) -> list[tuple[str, tuple[str | None, ...]]]:
    """The settings in which configs differ: the key with dots, and its values as text."""
    flat = [dict(_leaves(config)) for config in configs]
    keys = sorted({key for one in flat for key in one})
    rows = [(key, tuple(one.get(key) for one in flat)) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _leaves(value: object, prefix: str = "") -> Sequence[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [
            leaf
            for key, inner in value.items()
            for leaf in _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
        ]
    return [(prefix, json.dumps(value, ensure_ascii=False, sort_keys=True))]


ROUTES = [
    PageRoute("/compare", show, scope="read"),
    PageRoute("/compare.json", points, scope="read"),
]
