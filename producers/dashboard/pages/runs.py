"""The list of runs, as a page, as JSON and as CSV."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.run_pages import (
    ORDERS,
    PAUSED,
    RunFilter,
    RunKind,
    RunOrder,
    RunPage,
    RunPlace,
)
from infra.readmodel.runs import RunJson, Runs
from producers.dashboard.charts import curve
from producers.dashboard.formats import duration, url_part
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.dashboard.run_search import SEARCH_KEYS, parse_search
from producers.http.responses import MAX_LIMIT, ApiResponse, number
from producers.http.routes.runs import STATUSES, services
from schemas.errors import InvalidConfig, Issue

REWARD = "rollout/raw_reward"
SHOWN_STATUSES = (*STATUSES, PAUSED)
SPARK_WIDTH, SPARK_HEIGHT = 96.0, 20.0
PAGE_RUNS = 50
KEPT = (
    *("search", "status", "dataset", "model", "rollout", "workspace", "creator", "tag", "project"),
    *("archived", "sort", "limit"),
)
"""The parameters of the list that lead to the same list on each of its pages."""

LABELS: Mapping[RunOrder, tuple[str, str]] = {
    "newest": ("Newer", "Older"),
    "oldest": ("Older", "Newer"),
    "reward": ("Previous", "Next"),
    "name": ("Previous", "Next"),
}
"""How the links to the pages before and after a page are called."""

PageLink = Literal["prev", "next"]

COLUMNS = tuple(RunJson.__annotations__)
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""The characters by which a spreadsheet takes the text of a cell for a formula."""


async def index(request: Request) -> Response:
    order = _order(request)
    page = await _find(request, order)
    runs, now = services(request).readmodel.runs, services(request).clock.now()
    rewards = await runs.sparklines(page.runs, REWARD)
    left = await times_left(runs, page.runs, now)
    return html(
        request,
        "runs.html",
        {
            "rows": [
                _row(run, rewards.get(run["id"], []), left.get(run["id"]), now) for run in page.runs
            ],
            "total": page.total,
            "first": page.first,
            "last": page.first + len(page.runs) - 1,
            "to_previous": _place_query(request, page, "prev"),
            "to_following": _place_query(request, page, "next"),
            "kept": _kept_query(request),
            "labels": LABELS[order],
            "statuses": SHOWN_STATUSES,
            "orders": ORDERS,
            "order": order,
            "search_keys": SEARCH_KEYS,
            "has_filters": not {"search", "limit"} >= _kept_query(request).keys(),
            "has_errors": any(run["error"] for run in page.runs),
            "is_narrowed": not {"sort", "limit"} >= _kept_query(request).keys(),
        },
    )


async def as_json(request: Request) -> Response:
    """The runs that the page with the same address shows, as JSON, with the cursors of the pages before
    and after it."""
    page = await _find(request, _order(request))
    return ApiResponse(
        {
            "runs": [finite_run(run) for run in page.runs],
            "total_count": page.total,
            "has_more": page.following is not None,
            "next_cursor": page.following.cursor if page.following else None,
            "previous_cursor": page.previous.cursor if page.previous else None,
        },
        headers=_links(request, page),
    )


async def as_csv(request: Request) -> Response:
    """The runs that the page with the same address shows, as CSV. The header Link has the addresses of
    the pages before and after it."""
    page = await _find(request, _order(request))
    text = io.StringIO()
    lines = csv.writer(
        text
    )  # with the line ends of RFC 4180, so that it quotes both of their parts
    lines.writerow(COLUMNS)
    lines.writerows([_cell(value) for value in finite_run(run).values()] for run in page.runs)
    return Response(
        text.getvalue(),
        media_type="text/csv",
        headers={
            "Content-Disposition": 'attachment; filename="runs.csv"',
            **_links(request, page),
        },
    )


async def _find(request: Request, order: RunOrder) -> RunPage:
    """The page of runs that the filters and the cursor of a request select. Raises InvalidConfig."""
    words, asked = _parse_search(request)
    status = asked.get("status")
    if status and status not in SHOWN_STATUSES:
        message = f"must be one of {', '.join(SHOWN_STATUSES)}, got {status[:40]!r}"
        raise InvalidConfig(f"status {message}", issues=(Issue("status", message),))
    if request.query_params.get("offset"):
        message = "does not page this list; remove it, and follow the links of the list"
        raise InvalidConfig(f"offset {message}", issues=(Issue("offset", message),))
    after, before = _place(request, "after", order), _place(request, "before", order)
    if after and before:
        message = "cannot be used together with after; remove one of them"
        raise InvalidConfig(f"before {message}", issues=(Issue("before", message),))
    found = RunFilter(
        status=status,
        search=words or None,
        archived=_is_archived(asked),
        kind=_kind(request),
    )
    limit = number(request, "limit", default=PAGE_RUNS, least=1, most=MAX_LIMIT)
    return await services(request).readmodel.run_pages.at_place(
        order, limit=limit, found=found, after=after, before=before
    )


def _place(request: Request, name: str, order: RunOrder) -> RunPlace | None:
    """The place in the list that a parameter names. Raises InvalidConfig when it is not one that a list
    in this order has linked to."""
    text = request.query_params.get(name)
    if not text:
        return None
    try:
        return RunPlace.parse(text, order=order)
    except ValueError as error:
        message = (
            f"must be a cursor of this list with sort={order}, got {text[:40]!r}; remove it to see "
            "the first page, and follow the links from there"
        )
        raise InvalidConfig(f"{name} {message}", issues=(Issue(name, message),)) from error


def _kept_query(request: Request) -> dict[str, str]:
    """The filters, the order and the limit of a request, which each page of its list keeps."""
    asked = request.query_params
    return {name: asked[name] for name in KEPT if asked.get(name)}


def _place_query(request: Request, page: RunPage, link: PageLink) -> dict[str, str] | None:
    """The query of the page before or after a page; None when no run is there."""
    place = page.previous if link == "prev" else page.following
    name = "before" if link == "prev" else "after"
    return {**_kept_query(request), name: place.cursor} if place else None


def _links(request: Request, page: RunPage) -> dict[str, str]:
    """The header with the addresses of the pages before and after a page (RFC 8288)."""
    names: tuple[PageLink, ...] = ("prev", "next")
    links = [
        f'<{request.url.path}?{url_part(query)}>; rel="{name}"'
        for name in names
        if (query := _place_query(request, page, name))
    ]
    return {"Link": ", ".join(links)} if links else {}


def _order(request: Request) -> RunOrder:
    asked = request.query_params.get("sort") or "newest"
    for order in ORDERS:
        if asked == order:
            return order
    message = f"must be one of {', '.join(ORDERS)}, got {asked[:40]!r}"
    raise InvalidConfig(f"sort {message}", issues=(Issue("sort", message),))


def finite_run(run: RunJson) -> Mapping[str, object]:
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
    if isinstance(value, list):
        value = " ".join(value)
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return f"'{value}"
    return value


def _kind(request: Request) -> RunKind:
    _, asked = _parse_search(request)
    names = ("dataset", "model", "rollout", "workspace", "creator", "tag", "project")
    return RunKind(**{name: asked.get(name) for name in names})


def _parse_search(request: Request) -> tuple[str, Mapping[str, str]]:
    """The words of the search, and the values of its keys. Parameters take the place of its keys."""
    query = request.query_params
    words, found = parse_search(query.get("search", ""))
    return words, {**found, **{key: query[key] for key in SEARCH_KEYS if query.get(key)}}


def _is_archived(asked: Mapping[str, str]) -> bool:
    value = asked.get("archived", "false")
    if value not in ("true", "false"):
        message = f"must be true or false, got {value[:20]!r}"
        raise InvalidConfig(f"archived {message}", issues=(Issue("archived", message),))
    return value == "true"


def _row(
    run: RunJson, rewards: list[tuple[int, float]], left_s: float | None, now: datetime
) -> Mapping[str, object]:
    return {
        **run,
        "spark": curve(rewards, width=SPARK_WIDTH, height=SPARK_HEIGHT),
        "progress": progress(run),
        "eta_s": left_s,
        "duration_s": duration_s(run, now),
    }


def duration_s(run: RunJson, now: datetime) -> float | None:
    """How long a run lasts. The clock of the log may be ahead of the one of this machine."""
    if run["started_at"] is None:
        return None
    return max(0.0, ((run["completed_at"] or now) - run["started_at"]).total_seconds())


def progress(run: RunJson) -> float | None:
    """The part of a run's steps that are done, from 0 to 1; None while it is unknown."""
    if not run["total_steps"]:
        return None
    return min(1.0, (run["current_step"] or 0) / run["total_steps"])


async def times_left(runs: Runs, shown: Sequence[RunJson], now: datetime) -> Mapping[str, float]:
    """About how long running runs still take, in seconds, by the run's id, if they go on as in their
    newest steps. Runs that do not go on are absent: those that are paused, or past their last step."""
    going = [run for run in shown if _goes_on(run)]
    seconds = await runs.step_seconds(going, REWARD) if going else {}
    found = {}
    for run in going:
        done, total, started = run["current_step"] or 1, run["total_steps"] or 0, run["started_at"]
        taken = done - (run["parent_step"] or 0)
        if taken <= 0:  # a fork that has taken no step of its own
            continue
        usual = max(0.0, (now - (started or now)).total_seconds()) / taken
        found[run["id"]] = (total - done) * seconds.get(run["id"], usual)
    return found


def _goes_on(run: RunJson) -> bool:
    is_running = run["status"] == "running" and run["phase"] != "paused"
    return is_running and run["started_at"] is not None and 0 < (progress(run) or 0) < 1


def progress_text(run: RunJson, left_s: float | None) -> str:
    """How far a run is, like `step 12 of 40, about 3 min left`."""
    total = run["total_steps"]
    text = f"step {run['current_step'] or 0}" + (f" of {total}" if total else "")
    return text if left_s is None else f"{text}, about {duration(left_s)} left"


ROUTES = [
    PageRoute("/", index, scope="read"),
    PageRoute("/runs.json", as_json, scope="read"),
    PageRoute("/runs.csv", as_csv, scope="read"),
]
