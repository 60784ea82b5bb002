"""How a run came about: its events with a filter, and the hops of one sample."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infra.ports.event_log import Recorded
from producers.core.history.run_state import changes, run_state_at
from producers.core.history.trace import trace
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import ApiResponse, number
from producers.http.routes.events import cloud_event, parse_cursor, parse_types
from producers.http.routes.runs import find_run_with_history, services
from schemas.errors import NotFound
from schemas.events import EVENT_TYPES

SHOWN_EVENTS = 100
SEARCHED_EVENTS, MOST_PAGES = 1000, 5
"""A search reads so many events at once, and at most so often; its last event is where it goes on."""

LONGEST_SEARCH = 200
LARGEST_CURSOR = 2**63
SHOWN_CHARACTERS, FEWEST_CHARACTERS = 50_000, 200
"""Characters of all events on a page, so that it stays below 150 KB, and the least of one event."""


async def events(request: Request) -> Response:
    run, _ = await find_run_with_history(request)
    limit = number(request, "limit", default=SHOWN_EVENTS, least=1, most=500)
    found, following = await _read(request, run["id"], limit)
    shown = [_event(recorded) for recorded in found]
    values = {
        "run": run,
        "events": shown,
        "most": max(FEWEST_CHARACTERS, SHOWN_CHARACTERS // max(1, len(shown))),
        "types": sorted(EVENT_TYPES),
        "following": following,
    }
    return html(request, "events.html", values)


def _event(recorded: Recorded) -> dict[str, object]:
    """An event as the pages show it."""
    return {
        "cursor": str(recorded.cursor),
        "at": recorded.time,
        "type": recorded.event.type,
        "stream": recorded.stream,
        "version": recorded.version,
        "actor": recorded.actor,
        "data": json.dumps(recorded.event.model_dump(mode="json"), indent=2, ensure_ascii=False),
    }


async def data(request: Request) -> Response:
    """The same events as JSON, as CloudEvents."""
    run, _ = await find_run_with_history(request)
    limit = number(request, "limit", default=SHOWN_EVENTS, least=1, most=500)
    found, following = await _read(request, run["id"], limit)
    shown = [cloud_event(recorded).model_dump(mode="json") for recorded in found]
    return ApiResponse({"events": shown, "next": following})


async def _read(request: Request, run: str, limit: int) -> tuple[Sequence[Recorded], str | None]:
    """The events that the query asks for, and the cursor of the next ones: of some `types`, after a
    cursor, whose stream or data contain the text `search`. Raises InvalidConfig."""
    log, types = services(request).log, parse_types(request)
    after = parse_cursor(request.query_params.get("after"))
    search = request.query_params.get("search", "").strip()[:LONGEST_SEARCH].lower()
    if not search:
        page = await log.read(run, after=after, limit=limit, types=types)
        return page, str(page[-1].cursor) if len(page) == limit else None
    found: list[Recorded] = []
    for _ in range(MOST_PAGES):
        page = await log.read(run, after=after, limit=SEARCHED_EVENTS, types=types)
        found += [one for one in page if _contains(one, search)][: limit - len(found)]
        if len(found) == limit:
            return found, str(found[-1].cursor)
        if len(page) < SEARCHED_EVENTS:
            return found, None
        after = page[-1].cursor
    return found, str(after)


def _contains(recorded: Recorded, search: str) -> bool:
    return search in recorded.stream.lower() or search in recorded.event.model_dump_json().lower()


async def moment(request: Request) -> Response:
    """The state of the run at one of its events."""
    _, values = await _moment(request)
    return html(request, "moment.html", values)


async def moment_data(request: Request) -> Response:
    """The same state as JSON."""
    recorded, values = await _moment(request)
    shown = {key: values[key] for key in ("state", "changes", "previous", "following")}
    return ApiResponse({"event": cloud_event(recorded).model_dump(mode="json"), **shown})


async def _moment(request: Request) -> tuple[Recorded, dict[str, Any]]:
    run, _ = await find_run_with_history(request)
    core, at = services(request), parse_cursor(request.path_params["cursor"])
    moments = core.readmodel.moments
    is_possible = max(at.xid, at.position) < LARGEST_CURSOR
    place = await moments.place(run["id"], at) if is_possible else None
    if place is None:
        raise NotFound(f"run {run['name']} has no event at {at}; the list of its events shows all")
    [recorded] = await core.log.events_at([place])
    previous = await moments.before(run["id"], at)
    following = await core.log.read(run["id"], after=at, limit=1)
    state = await run_state_at(moments, core.log, run["id"], at)
    before = await run_state_at(moments, core.log, run["id"], previous) if previous else {}
    return recorded, {
        "run": run,
        "event": _event(recorded),
        "state": state,
        "changes": changes(before, state),
        "previous": str(previous) if previous else None,
        "following": str(following[0].cursor) if following else None,
    }


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
    PageRoute("/runs/{ref}/events.json", data, scope="read"),
    PageRoute("/runs/{ref}/at/{cursor}", moment, scope="read"),
    PageRoute("/runs/{ref}/at/{cursor}/state.json", moment_data, scope="read"),
    PageRoute("/runs/{ref}/trace/{sample}", hops, scope="read"),
]
