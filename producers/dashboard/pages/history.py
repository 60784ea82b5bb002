"""How a run came about: its events with a filter, and the hops of one sample."""

import json
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from producers.core.trace import trace
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import number
from producers.http.routes.events import parse_cursor, parse_types
from producers.http.routes.runs import find_run_with_history, services
from schemas.events import EVENT_TYPES

SHOWN_EVENTS = 100
SHOWN_CHARACTERS, FEWEST_CHARACTERS = 50_000, 200
"""Characters of all events on a page, so that it stays below 150 KB, and the least of one event."""


async def events(request: Request) -> Response:
    run, _ = await find_run_with_history(request)
    after = parse_cursor(request.query_params.get("after"))
    limit = number(request, "limit", default=SHOWN_EVENTS, least=1, most=500)
    found = await services(request).log.read(
        run["id"], after=after, limit=limit, types=parse_types(request)
    )
    shown = [
        {
            "at": recorded.time,
            "type": recorded.event.type,
            "stream": recorded.stream,
            "version": recorded.version,
            "actor": recorded.actor,
            "data": json.dumps(
                recorded.event.model_dump(mode="json"), indent=2, ensure_ascii=False
            ),
        }
        for recorded in found
    ]
    values = {
        "run": run,
        "events": shown,
        "most": max(FEWEST_CHARACTERS, SHOWN_CHARACTERS // max(1, len(shown))),
        "types": sorted(EVENT_TYPES),
        "following": str(found[-1].cursor) if len(found) == limit else None,
    }
    return html(request, "events.html", values)


async def hops(request: Request) -> Response:
    """The eight hops of the sample that the path names."""
    run, _ = await find_run_with_history(request)
    sample = request.path_params["sample"]
    requested = await services(request).lookup.whole_run(run["id"])
    found = await trace(services(request).log, requested, sample)
    values = {"run": run, "sample": sample, "hops": [asdict(hop) for hop in found]}
    return html(request, "hops.html", values)


ROUTES = [
    PageRoute("/runs/{ref}/events", events, scope="read"),
    PageRoute("/runs/{ref}/trace/{sample}", hops, scope="read"),
]
