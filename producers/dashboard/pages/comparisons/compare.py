"""Several runs beside each other: their curves, and the settings that differ. Runs that differ in their
seed only are one group, with the mean of their rewards."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.runs import RunJson
from producers.core.history.metric_titles import TITLES, VALIDATION
from producers.dashboard.charts import finite_points
from producers.dashboard.overlay import MeanPoint, band, mean_points, overlay
from producers.dashboard.pages.run import SVG_POINTS
from producers.dashboard.pages.runs import REWARD, finite_run
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import ApiResponse
from producers.http.routes.runs import find_run, services
from schemas.errors import InvalidConfig, Issue, NotFound

MOST_RUNS = 8
DRAWN_POINTS = 400
SEED = "advanced.seed"
SEED_KEYS = (REWARD, VALIDATION)
MOST_BESIDE, MOST_SEEDS = 200, 50
"""Runs of the same model, data and code that are looked at for other seeds, and runs of one group."""


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
    changed = differences([config for _, config in found])
    return html(
        request,
        "compare.html",
        {
            "runs": [run for run, _ in found],
            "charts": charts,
            "differences": changed,
            "seeds_of": found[0][0] if {key for key, _ in changed} == {SEED} else None,
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
        row = await services(request).readmodel.runs.get_run(name)
        if row is None:
            raise NotFound(f"there is no run {name[:200]!r}; the list of runs shows all")
        found.append((row[0], json.loads(row[1])))
    return found


async def show_seeds(request: Request) -> Response:
    """The runs that differ from one in their seed only, as one group."""
    run, group = await seed_group(request)
    drawn = [
        {"title": TITLES[key], "points": points, "band": band(points)}
        for key, points in (await _mean_curves(request, group)).items()
    ]
    return html(
        request,
        "seeds.html",
        {
            "run": run,
            "group": group,
            "drawn": drawn,
            "most": MOST_SEEDS,
            "most_looked": MOST_BESIDE,
        },
    )


async def seeds_data(request: Request) -> Response:
    """The same group as JSON."""
    run, group = await seed_group(request)
    curves = await _mean_curves(request, group)
    return ApiResponse(
        {
            "run": run["name"],
            "runs": [{"seed": seed, **finite_run(one)} for seed, one in group],
            "curves": {key: [asdict(one) for one in points] for key, points in curves.items()},
        }
    )


async def seed_group(request: Request) -> tuple[RunJson, list[tuple[int, RunJson]]]:
    """The run of the path, and the runs that differ from it in their seed only, it among them, in order
    of their seeds. Raises NotFound."""
    run, config = await find_run(request)
    wanted, _ = without_seed(config)
    found = []
    for one, text in await services(request).readmodel.runs.beside(run["id"], most=MOST_BESIDE):
        rest, seed = without_seed(text)
        if rest == wanted:
            found.append((seed, one))
    group = sorted(found[:MOST_SEEDS], key=lambda member: (member[0], member[1]["created_at"]))
    return run, group


def without_seed(config: str) -> tuple[object, int]:
    """A config (as JSON text) without its seed, and the seed."""
    values = json.loads(config)
    return values, values.get("advanced", {}).pop("seed", 0)


async def _mean_curves(
    request: Request, group: Sequence[tuple[int, RunJson]]
) -> Mapping[str, Sequence[MeanPoint]]:
    """The mean rewards of a group at steps that its longest run has."""
    if not group:
        return {}
    runs = services(request).readmodel.runs
    longest = max((run for _, run in group), key=lambda run: run["current_step"] or 0)
    sampled = await runs.sampled_curves(longest["id"], SEED_KEYS, most=SVG_POINTS)
    members = [run["id"] for _, run in group]
    return {
        key: mean_points(await runs.values_at(members, key, [step for step, _ in curve]))
        for key, curve in sampled.items()
    }


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
    PageRoute("/runs/{ref}/seeds", show_seeds, scope="read"),
    PageRoute("/runs/{ref}/seeds.json", seeds_data, scope="read"),
]
