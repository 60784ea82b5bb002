"""A waterfall of the steps of a run: when each was generated, graded, learned and published."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.timeline import PHASES, StepTimes
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import ApiResponse, number
from producers.http.routes.runs import find_run_with_history, services

SHOWN_STEPS = 20
WIDTH = 1000.0
NARROWEST = 2.0
"""The least width of a bar, so that a short phase can be seen."""

DEFAULT_AHEAD = 4
"""No mode samples further ahead than this, unless the config says so."""

LARGEST_STEP = 2**31 - 1


class Extent(BaseModel):
    """The steps on a page: the first and the last one, and the first ones of the pages beside it.
    `is_cut` means that the page has fewer steps than others, because they have too many events."""

    first: int
    last: int
    is_cut: bool
    earlier: int | None
    later: int | None


@dataclass(frozen=True, slots=True)
class Bar:
    """A phase of a step as it is drawn: left edge and width in units of the picture. `is_open` means
    that it has not ended."""

    phase: str
    left: float
    width: float
    seconds: float | None
    is_open: bool


async def index(request: Request) -> Response:
    run, _ = await find_run_with_history(request)
    extent, steps = await _steps(request)
    begin, end = _bounds(steps)
    rows = [
        {
            "step": one.step,
            "groups": one.groups,
            "is_skipped": one.is_skipped,
            "bars": bars(one, begin, end),
            "seconds": {name: span.seconds for name, span in one.spans.items()},
        }
        for one in steps
    ]
    values = {
        "run": run,
        "extent": extent,
        "rows": rows,
        "phases": PHASES,
        "begin": begin,
        "lasted_s": (end - begin).total_seconds() if begin and end else None,
    }
    return html(request, "timeline.html", values)


async def data(request: Request) -> Response:
    """The same times as JSON."""
    extent, steps = await _steps(request)
    return ApiResponse(
        {
            "extent": extent.model_dump(),
            "steps": [
                {
                    "step": one.step,
                    "groups": one.groups,
                    "skipped": one.is_skipped,
                    **{
                        name: {"begin": span.begin, "end": span.end, "seconds": span.seconds}
                        for name, span in one.spans.items()
                    },
                }
                for one in steps
            ],
        }
    )


async def _steps(request: Request) -> tuple[Extent, Sequence[StepTimes]]:
    """The steps that the query names: from `step`, or the newest ones."""
    run, config = await find_run_with_history(request)
    newest = (run["current_step"] or 0) + 1  # also the one that is being done
    first, is_named = max(1, newest - SHOWN_STEPS + 1), bool(request.query_params.get("step"))
    if is_named:
        first = number(request, "step", default=first, least=1, most=LARGEST_STEP)
    depth = json.loads(config).get("advanced", {}).get("max_steps_off_policy")
    ahead = DEFAULT_AHEAD if depth is None else depth
    timelines, wanted = services(request).readmodel.timelines, first + SHOWN_STEPS - 1
    found, last = await timelines.steps(run["id"], first=first, last=wanted, ahead=ahead)
    if last < wanted and not is_named:  # as many, but the newest ones
        first += wanted - last
        found, last = await timelines.steps(run["id"], first=first, last=wanted, ahead=ahead)
    extent = Extent(
        first=first,
        last=last,
        is_cut=last < first + SHOWN_STEPS - 1,
        earlier=max(1, first - (last - first + 1)) if first > 1 else None,
        later=last + 1 if last < newest else None,
    )
    return extent, found


def _bounds(steps: Sequence[StepTimes]) -> tuple[datetime | None, datetime | None]:
    """The first and the last moment of the phases of these steps."""
    spans = [span for one in steps for span in one.spans.values()]
    begin = min((span.begin for span in spans), default=None)
    return begin, max((span.end or span.begin for span in spans), default=None)


def bars(step: StepTimes, begin: datetime | None, end: datetime | None) -> list[Bar]:
    """The bars of a step in a picture that goes from `begin` to `end`."""
    if begin is None or end is None:
        return []
    length = max((end - begin).total_seconds(), 1e-3)
    found = []
    for phase, span in step.spans.items():
        left = WIDTH * (span.begin - begin).total_seconds() / length
        right = WIDTH * ((span.end or end) - begin).total_seconds() / length
        width = max(NARROWEST, right - left)
        found.append(
            Bar(phase, min(left, WIDTH - width), width, span.seconds, is_open=span.end is None)
        )
    return found


ROUTES = [
    PageRoute("/runs/{ref}/timeline", index, scope="read"),
    PageRoute("/runs/{ref}/timeline.json", data, scope="read"),
]
