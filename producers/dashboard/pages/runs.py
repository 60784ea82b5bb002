"""The list of runs, as a page, as JSON and as CSV."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from datetime import datetime

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.runs import ANY_KIND, ORDERS, PageRange, RunJson, RunKind
from producers.dashboard.charts import curve
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import flag, page_of, page_response
from producers.http.routes.runs import STATUSES, services
from schemas.errors import InvalidConfig, Issue

REWARD = "rollout/raw_reward"
SPARK_WIDTH, SPARK_HEIGHT = 96.0, 20.0
COLUMNS = tuple(RunJson.__annotations__)
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""The characters by which a spreadsheet takes the text of a cell for a formula."""


async def index(request: Request) -> Response:
    order, page, kind = _order(request), page_of(request), _kind(request)
    found, total = await _find(request, page)
    rewards = await services(request).readmodel.runs.sparklines(found, REWARD)
    now = services(request).clock.now()
    return html(
        request,
        "runs.html",
        {
            "rows": [_row(run, rewards.get(run["id"], []), now) for run in found],
            "total": total,
            "page": page,
            "statuses": STATUSES,
            "orders": tuple(ORDERS),
            "order": order,
            "kind": kind,
            "narrowed": kind != ANY_KIND,
        },
    )


async def as_json(request: Request) -> Response:
    """The runs that the page with the same filters shows, as JSON."""
    page = page_of(request)
    found, total = await _find(request, page)
    return page_response("runs", [_finite(run) for run in found], total, page)


async def as_csv(request: Request) -> Response:
    """The runs that the page with the same filters shows, as CSV."""
    found, _ = await _find(request, page_of(request))
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(COLUMNS)
    lines.writerows([_cell(value) for value in _finite(run).values()] for run in found)
    return Response(
        text.getvalue(),
        media_type="text/csv",
        headers={"Content-Disposition": 'attachment; filename="runs.csv"'},
    )


async def _find(request: Request, page: PageRange) -> tuple[Sequence[RunJson], int]:
    """The runs of a page that the filters of a request select, and how many there are in all."""
    status = request.query_params.get("status") or None
    if status and status not in STATUSES:
        message = f"must be one of {', '.join(STATUSES)}, got {status[:40]!r}"
        raise InvalidConfig(f"status {message}", issues=(Issue("status", message),))
    return await services(request).readmodel.runs.page(
        page,
        status=status,
        search=request.query_params.get("search") or None,
        archived=flag(request, "archived"),
        kind=_kind(request),
        order=_order(request),
    )


def _order(request: Request) -> str:
    order = request.query_params.get("sort") or "newest"
    if order not in ORDERS:
        message = f"must be one of {', '.join(ORDERS)}, got {order[:40]!r}"
        raise InvalidConfig(f"sort {message}", issues=(Issue("sort", message),))
    return order


def _finite(run: RunJson) -> Mapping[str, object]:
    """The columns of a run, with null for a reward that is not a finite number."""
    values: dict[str, object] = {name: run.get(name) for name in COLUMNS}
    reward = run["reward"]
    if reward is not None and not math.isfinite(reward):
        values["reward"] = None
    return values


def _cell(value: object) -> object:
    """A value as a spreadsheet shows it. Texts stay texts, also those that look like formulas."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return f"'{value}"
    return value


def _kind(request: Request) -> RunKind:
    asked = request.query_params
    return RunKind(
        dataset=asked.get("dataset") or None,
        model=asked.get("model") or None,
        rollout=asked.get("rollout") or None,
        workspace=asked.get("workspace") or None,
        creator=asked.get("creator") or None,
    )


def _row(run: RunJson, rewards: list[tuple[int, float]], now: datetime) -> Mapping[str, object]:
    return {
        **run,
        "spark": curve(rewards, width=SPARK_WIDTH, height=SPARK_HEIGHT),
        "progress": progress(run),
        "eta_s": eta_s(run, now),
    }


def progress(run: RunJson) -> float | None:
    """The part of a run's steps that are done, from 0 to 1; None while it is unknown."""
    if not run["total_steps"]:
        return None
    return min(1.0, (run["current_step"] or 0) / run["total_steps"])


def eta_s(run: RunJson, now: datetime) -> float | None:
    """About how long a running run still takes, in seconds, if it goes on as it did so far."""
    done, part = run["current_step"], progress(run)
    if run["status"] != "running" or not done or not part or run["started_at"] is None:
        return None
    return (now - run["started_at"]).total_seconds() * (1 - part) / part


ROUTES = [
    PageRoute("/", index, scope="read"),
    PageRoute("/runs.json", as_json, scope="read"),
    PageRoute("/runs.csv", as_csv, scope="read"),
]
