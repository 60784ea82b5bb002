"""The list of runs."""

from collections.abc import Mapping
from datetime import datetime

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.runs import ANY_KIND, ORDERS, RunJson, RunKind
from producers.dashboard.charts import curve
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import flag, page_of
from producers.http.routes.runs import STATUSES, services
from schemas.errors import InvalidConfig, Issue

REWARD = "rollout/raw_reward"
SPARK_WIDTH, SPARK_HEIGHT = 96.0, 20.0


async def index(request: Request) -> Response:
    status = request.query_params.get("status") or None
    if status and status not in STATUSES:
        message = f"must be one of {', '.join(STATUSES)}, got {status[:40]!r}"
        raise InvalidConfig(f"status {message}", issues=(Issue("status", message),))
    order = request.query_params.get("sort") or "newest"
    if order not in ORDERS:
        message = f"must be one of {', '.join(ORDERS)}, got {order[:40]!r}"
        raise InvalidConfig(f"sort {message}", issues=(Issue("sort", message),))
    page, kind = page_of(request), _kind(request)
    runs = services(request).readmodel.runs
    found, total = await runs.page(
        page,
        status=status,
        search=request.query_params.get("search") or None,
        archived=flag(request, "archived"),
        kind=kind,
        order=order,
    )
    rewards = await runs.sparklines(found, REWARD)
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


def _kind(request: Request) -> RunKind:
    asked = request.query_params
    return RunKind(
        dataset=asked.get("dataset") or None,
        model=asked.get("model") or None,
        rollout=asked.get("rollout") or None,
        workspace=asked.get("workspace") or None,
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


ROUTES = [PageRoute("/", index, scope="read")]
