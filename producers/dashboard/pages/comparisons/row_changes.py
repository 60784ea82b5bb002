"""The held-out rows that differ between two checkpoints or two evaluations, with what was asked."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.estimates import HIGH, LOW, Interval, is_figure
from producers.core.models.comparison import compare_checkpoints
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.downloads import select_lines
from producers.http.responses import ApiResponse, page_of
from producers.http.routes.evaluations import compare_evaluations, find_evaluation
from producers.http.routes.runs import services
from schemas.datasets import DatasetRow
from schemas.errors import InvalidConfig, Issue, NotFound
from schemas.specs import DatasetRef

COLUMNS = ("row", "change", "reward_a", "reward_b", "difference", "passed_a", "passed_b")
SHOWN_QUESTION = 300

Comparison = Mapping[str, Any]


async def show_checkpoints(request: Request) -> Response:
    a, b = _names(request)
    if not a:
        return _page(request, "checkpoints", {"names": ("", ""), "both": ()})
    found, dataset = await _compare_checkpoints(request, a, b)
    both = [
        {"name": one["ref"], "id": one["run"], "answers": f"{one['run']}v{one['step']}"}
        for one in found["checkpoints"]
    ]
    rewards = [one["held_out_reward"] for one in found["checkpoints"]]
    intervals = [one["held_out_interval"] for one in found["checkpoints"]]
    values = {
        "names": (a, b),
        "both": both,
        "figures": [{"key": "held-out reward", "values": rewards, "intervals": intervals}],
        "settings": found["settings"],
        "reason": found["reason"],
    }
    return await _rows_page(request, "checkpoints", values, found, dataset)


async def show_evaluations(request: Request) -> Response:
    a, b = _names(request)
    if not a:
        return _page(request, "evaluations", {"names": ("", ""), "both": ()})
    found, dataset = await _compare_evaluations(request, a, b)
    both = [{"name": one["name"], "id": one["id"], "answers": one["id"]} for one in found["evals"]]
    metrics = {metric["key"]: metric["values"] for metric in found["metrics"]}
    rewards = [one["reward"] for one in found["evals"]]
    figures = [
        {"key": "reward", "values": rewards, "intervals": _intervals(metrics, "eval/reward")},
        *(
            {"key": key, "values": values, "intervals": _intervals(metrics, key)}
            for key, values in metrics.items()
            if is_figure(key)
        ),
    ]
    values = {"names": (a, b), "both": both, "figures": figures, "settings": (), "reason": None}
    return await _rows_page(request, "evaluations", values, found, dataset)


def _intervals(
    metrics: Mapping[str, Sequence[float | None]], key: str
) -> Sequence[Interval | None]:
    """The intervals of a figure of two evaluations."""
    ends = zip(*(metrics.get(key + end, (None, None)) for end in (LOW, HIGH)), strict=True)
    return [None if low is None or high is None else (low, high) for low, high in ends]


async def checkpoints_json(request: Request) -> Response:
    """The comparison of two checkpoints as JSON."""
    found, _ = await _compare_checkpoints(request, *_names(request, required=True))
    return ApiResponse(found)


async def evaluations_json(request: Request) -> Response:
    """The comparison of two evaluations as JSON."""
    found, _ = await _compare_evaluations(request, *_names(request, required=True))
    return ApiResponse(found)


async def checkpoints_csv(request: Request) -> Response:
    """The rows of two checkpoints as CSV."""
    found, _ = await _compare_checkpoints(request, *_names(request, required=True))
    return _csv(found)


async def evaluations_csv(request: Request) -> Response:
    """The rows of two evaluations as CSV."""
    found, _ = await _compare_evaluations(request, *_names(request, required=True))
    return _csv(found)


def _names(request: Request, *, required: bool = False) -> tuple[str, str]:
    """The two things that the query names, as `a` and `b` or as `chosen` twice; empty texts without any.
    Raises InvalidConfig when it names another number of them."""
    query = request.query_params
    names = [query.get("a", "").strip(), query.get("b", "").strip(), *query.getlist("chosen")]
    names = [name for name in names if name]
    if not names and not required:
        return "", ""
    if len(names) != 2:
        message = f"must name two to compare, got {len(names)}"
        raise InvalidConfig(f"a, b {message}", issues=(Issue("a", message),))
    return names[0], names[1]


async def _compare_checkpoints(
    request: Request, a: str, b: str
) -> tuple[Comparison, DatasetRef | None]:
    core = services(request)
    first, second = await core.lookup.checkpoint(a), await core.lookup.checkpoint(b)
    found = await compare_checkpoints(first, second, evaluations=core.readmodel.evaluations)
    return found, first.run.validation


async def _compare_evaluations(
    request: Request, a: str, b: str
) -> tuple[Comparison, DatasetRef | None]:
    first, second = await find_evaluation(request, a), await find_evaluation(request, b)
    found = await compare_evaluations(request, first, second)
    return found, DatasetRef.model_validate_json(first["dataset_ref"])


async def _rows_page(
    request: Request,
    kind: str,
    values: Mapping[str, object],
    found: Comparison,
    dataset: DatasetRef | None,
) -> Response:
    """The page with a part of the rows that changed, the largest differences first."""
    page = page_of(request)
    changed = sort_changes(found["rows"])
    shown = changed[page.offset : page.offset + page.limit]
    questions = await _questions(request, dataset, {int(row["row"]) for row in shown})
    more = {
        "caveats": found.get("caveats", ()),
        "differences": found["differences"],
        "counts": found["counts"],
        "rows": [
            {**row, "difference": difference(row), "question": questions.get(int(row["row"]), "")}
            for row in shown
        ],
        "total": len(changed),
        "page": page,
    }
    return _page(request, kind, {**values, **more})


def _page(request: Request, kind: str, values: Mapping[str, object]) -> Response:
    return html(request, "row_changes.html", {"kind": kind, **values})


def sort_changes(rows: Sequence[Comparison]) -> list[Comparison]:
    """The rows whose results are not the same, those first whose reward fell or rose most."""
    changed = [row for row in rows if row["change"] != "same" or difference(row)]
    return sorted(changed, key=lambda row: (-abs(difference(row) or 0.0), row["row"]))


def difference(row: Comparison) -> float | None:
    """By how much the reward of a row changed; None if one side has none."""
    before, after = row["reward"]
    return None if before is None or after is None else after - before


async def _questions(
    request: Request, dataset: DatasetRef | None, rows: set[int]
) -> Mapping[int, str]:
    """The last message of the prompt of each row, or nothing when the dataset is gone."""
    if dataset is None or not rows:
        return {}
    try:
        lines = await select_lines(request, dataset.content, rows)
    except NotFound:
        return {}
    found = {number: DatasetRow.model_validate_json(line) for number, line in lines.items()}
    return {
        number: str(row.prompt[-1].content or "")[:SHOWN_QUESTION]
        for number, row in found.items()
        if row.prompt
    }


def _csv(found: Comparison) -> Response:
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(COLUMNS)
    for row in cast(Sequence[Comparison], found["rows"]):
        figures = (*row["reward"], difference(row), *row["passed"])
        lines.writerow((row["row"], row["change"], *figures))
    return Response(
        out.getvalue(),
        media_type="text/csv",
        headers={"Content-Disposition": 'attachment; filename="rows.csv"'},
    )


ROUTES = [
    PageRoute("/compare/checkpoints", show_checkpoints, scope="read"),
    PageRoute("/compare/checkpoints.json", checkpoints_json, scope="read"),
    PageRoute("/compare/checkpoints.csv", checkpoints_csv, scope="read"),
    PageRoute("/compare/evaluations", show_evaluations, scope="read"),
    PageRoute("/compare/evaluations.json", evaluations_json, scope="read"),
    PageRoute("/compare/evaluations.csv", evaluations_csv, scope="read"),
]
