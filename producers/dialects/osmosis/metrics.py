"""The metrics of a training run, thinned."""

from datetime import datetime

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.runs import MetricHistory, RunJson
from producers.core.history.metric_titles import title_of
from producers.core.workspaces import Workspace
from producers.dialects.osmosis.requests import Wire, answer, services
from producers.dialects.osmosis.scope import in_workspace, route
from producers.dialects.osmosis.training import NUM_SAMPLES, find_run_with_history

MOST_POINTS = 500
"""The most points of a metric in a response."""


class PointWire(Wire):
    """`timestamp` is in milliseconds since the epoch."""

    step: int
    value: float
    timestamp: int


class HistoryWire(Wire):
    metric_key: str
    title: str
    data_points: list[PointWire]


class SummaryWire(Wire):
    key: str
    title: str
    initial: float
    latest: float
    delta: float
    min: float
    max: float


class Overview(Wire):
    duration_ms: int | None
    examples_processed_count: int | None
    latest_step: int | None
    total_steps: int | None
    metric_summaries: list[SummaryWire]


class Metrics(Wire):
    status: str
    overview: Overview
    metrics: list[HistoryWire]


async def show(request: Request, workspace: Workspace) -> Response:
    """Return the metrics of a run. The first and the last point of each are exact."""
    del workspace
    run, _ = await find_run_with_history(request, request.path_params["ref"])
    core = services(request)
    keys = await core.readmodel.runs.metric_keys(run["id"])
    found = await core.readmodel.runs.metric_histories(run["id"], keys, most_points=MOST_POINTS)
    samples = await core.readmodel.runs.total(run["id"], NUM_SAMPLES)
    overview = Overview(
        duration_ms=_duration_ms(run, now=core.clock.now()),
        examples_processed_count=None if samples is None else int(samples),
        latest_step=run["current_step"],
        total_steps=run["total_steps"],
        metric_summaries=[_summary(one) for one in found],
    )
    metrics = [_history(one) for one in found]
    return answer(Metrics(status=run["status"], overview=overview, metrics=metrics))


def _duration_ms(run: RunJson, *, now: datetime) -> int | None:
    started = run["started_at"]
    if started is None:
        return None
    return max(0, round(((run["completed_at"] or now) - started).total_seconds() * 1000))


def _summary(history: MetricHistory) -> SummaryWire:
    initial, latest = history.points[0]["value"], history.points[-1]["value"]
    return SummaryWire(
        key=history.key,
        title=title_of(history.key),
        initial=initial,
        latest=latest,
        delta=latest - initial,
        min=history.least,
        max=history.most,
    )


def _history(history: MetricHistory) -> HistoryWire:
    points = [
        PointWire(
            step=one["step"], value=one["value"], timestamp=round(one["at"].timestamp() * 1000)
        )
        for one in history.points
    ]
    return HistoryWire(metric_key=history.key, title=title_of(history.key), data_points=points)


ROUTES = [route("/training-runs/{ref}/metrics", in_workspace(show), scope="read")]
