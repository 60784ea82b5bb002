"""The regrades of a run: a list of them, and the report of one with its largest disagreements."""

from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from producers.core.history.regrade_views import RegradeView, regrade_json
from producers.dashboard.pages.samples import slot_text
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import ApiResponse
from producers.http.routes.runs import find_run_with_history, services
from schemas.errors import NotFound
from schemas.ids import GroupKey, parse_sample_id

SHOWN_STEPS = 200
"""Steps that the page of a report lists; its JSON has all."""

FIGURES = (
    ("Mean reward before", "reward_before", "number"),
    ("Mean reward after", "reward_after", "number"),
    ("Rewards changed", "changed_share", "share"),
    ("Flips around the group's mean", "mean_flip_share", "share"),
    ("Flips at the threshold", "threshold_flip_share", "share"),
    ("Kendall's tau in groups", "kendall_tau", "number"),
    ("Groups that lose all differences", "groups_flattened", "number"),
    ("Groups that gain a difference", "groups_spread", "number"),
    ("Advantages that change sign", "advantage_sign_share", "share"),
    ("Samples that lose their reward", "lost", "number"),
)
"""The figures of a report: title, key, and how the value is written."""


async def index(request: Request) -> Response:
    run, _ = await find_run_with_history(request)
    found = await services(request).regrades.list_regrades(run["id"])
    shown = [{**regrade_json(view), "at": view.at} for view in found]
    return html(request, "regrades.html", {"run": run, "regrades": shown})


async def show(request: Request) -> Response:
    run, _ = await find_run_with_history(request)
    view = await _find(request, run["id"])
    found = regrade_json(view)
    values = {
        "run": run,
        "regrade": {**found, "at": view.at},
        "figures": _figures(found),
        "steps": list(_by_step(found).items())[:SHOWN_STEPS],
        "cosines": _cosines(view),
        "worst": [_place(one) for one in _rows(found, "worst")],
        "ungraded": [_place(one) for one in _rows(found, "ungraded")],
    }
    return html(request, "regrade.html", values)


async def data(request: Request) -> Response:
    """The report as JSON."""
    run, _ = await find_run_with_history(request)
    return ApiResponse({"regrade": regrade_json(await _find(request, run["id"]))})


async def _find(request: Request, run: str) -> RegradeView:
    """The regrade of this run that the address names. Raises NotFound."""
    view = await services(request).regrades.find_regrade(request.path_params["id"])
    if view.run != run:
        raise NotFound(f"this run has no regrade {view.id!r}; see the list of its regrades")
    return view


def _by_step(found: Mapping[str, object]) -> Mapping[int, Mapping[str, object]]:
    steps = found["by_step"]
    assert isinstance(steps, dict)  # noqa: S101 - made by `regrade_json`
    return steps


def _rows(found: Mapping[str, object], name: str) -> Sequence[Mapping[str, object]]:
    rows = found[name]
    assert isinstance(rows, list)  # noqa: S101 - made by `regrade_json`
    return rows


def _figures(found: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    report = found["report"]
    if not isinstance(report, dict):
        return ()
    return [{"title": title, "value": report[key], "form": form} for title, key, form in FIGURES]


def _cosines(view: RegradeView) -> Mapping[int, float | None]:
    """The cosine of the gradients, by step."""
    return {one.step: one.cosine for one in view.gradients.steps} if view.gradients else {}


def _place(one: Mapping[str, object]) -> Mapping[str, object]:
    """A sample with its place in the reader of samples."""
    group, index = parse_sample_id(str(one["sample"]))
    key = GroupKey.parse(group)
    return {**one, "slot": slot_text(key.slot, key.replacement), "index": index}


ROUTES = [
    PageRoute("/runs/{ref}/regrades", index, scope="read"),
    PageRoute("/runs/{ref}/regrades/{id}", show, scope="read"),
    PageRoute("/runs/{ref}/regrades/{id}/report.json", data, scope="read"),
]
