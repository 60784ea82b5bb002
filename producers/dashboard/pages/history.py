"""How a run came about: its events with a filter, and the hops of one sample."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.runs import RunJson
from infra.spine.ports.event_log import Cursor, Encoded, EventStore, Recorded
from producers.core.history.run_state import changes, run_state_at
from producers.core.history.trace import Trace, trace
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import ApiResponse, number
from producers.http.routes.events import cloud_event, parse_cursor, parse_types
from producers.http.routes.runs import find_run_with_history, services
from schemas.errors import NotFound
from schemas.events import ALL_EVENTS

SHOWN_EVENTS = 100
SEARCHED_EVENTS, MOST_PAGES = 1000, 3
"""A search reads so many events at once, and at most so often; its last event is where it goes on."""

LONGEST_SEARCH = 200
LARGEST_CURSOR = 2**63
LAST, END = Cursor(LARGEST_CURSOR - 1, LARGEST_CURSOR - 1), "end"
FILTERS = ("types", "search", "limit")
SHOWN_CHARACTERS, FEWEST_CHARACTERS = 50_000, 200
"""Characters of all events on a page, so that it stays below 150 KB, and the least of one event."""


async def events(request: Request) -> Response:
    run, _ = await find_run_with_history(request)
    limit = number(request, "limit", default=SHOWN_EVENTS, least=1, most=500)
    page = await _read(request, run["id"], limit)
    shown = [_event(recorded) for recorded in page.events]
    values = {
        "run": run,
        "events": shown,
        "most": max(FEWEST_CHARACTERS, SHOWN_CHARACTERS // max(1, len(shown))),
        "types": sorted(event.type for event in ALL_EVENTS),
        "previous": page.previous,
        "following": page.following,
        "searched": page.searched,
        "filters": {key: value for key in FILTERS if (value := request.query_params.get(key))},
    }
    return html(request, "events.html", values)


def _event(recorded: Recorded) -> dict[str, object]:
    """An event as the pages show it."""
    return {
        "cursor": str(recorded.cursor),
        "at": recorded.time,
        "type": recorded.type,
        "stream": recorded.stream,
        "version": recorded.version,
        "actor": recorded.actor,
        "data": json.dumps(recorded.event.model_dump(mode="json"), indent=2, ensure_ascii=False),
    }


async def data(request: Request) -> Response:
    """The same events as JSON, as CloudEvents."""
    run, _ = await find_run_with_history(request)
    limit = number(request, "limit", default=SHOWN_EVENTS, least=1, most=500)
    page = await _read(request, run["id"], limit)
    shown = [cloud_event(recorded).model_dump(mode="json") for recorded in page.events]
    return ApiResponse({"events": shown, "previous": page.previous, "next": page.following})


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events, with the cursors of the pages beside them: `previous` for `before`, `following` for
    `after`. `searched` counts the events that a search has looked at."""

    events: Sequence[Recorded]
    previous: str | None = None
    following: str | None = None
    searched: int = 0


async def _read(request: Request, run: str, limit: int) -> EventPage:
    """The events that the query asks for: of some `types`, `after` a cursor or the last ones `before`
    one (or before the `end`), whose stream or data contain the text `search`. Raises InvalidConfig."""
    core, types = services(request), parse_types(request)
    search = request.query_params.get("search", "").strip()[:LONGEST_SEARCH].lower()
    after = parse_cursor(request.query_params.get("after"))
    if search:
        return await _search(core.log, run, search, after=after, limit=limit, types=types)
    before, end = request.query_params.get("before"), LAST
    if before:
        end = end if before == END else parse_cursor(before)
        begin = await core.readmodel.state_at_event.before_page(run, end, limit=limit, types=types)
        after = begin or Cursor()
    found = await core.log.read(run, after=after, limit=limit + 1, types=types)
    shown = [one for one in found[:limit] if one.cursor < end]
    has_earlier = after != Cursor() and bool(shown)
    return EventPage(
        shown,
        previous=str(shown[0].cursor) if has_earlier else None,
        following=str(shown[-1].cursor) if len(found) > len(shown) else None,
    )


async def _search(
    log: EventStore,
    run: str,
    search: str,
    *,
    after: Cursor,
    limit: int,
    types: Sequence[str] | None,
) -> EventPage:
    """The first events after a cursor that contain a text, among the next ones."""
    found: list[Recorded] = []
    searched = 0
    for _ in range(MOST_PAGES):
        page = await log.read(run, after=after, limit=SEARCHED_EVENTS, types=types)
        for one in page:
            searched += 1
            if _contains(one, search):
                found.append(one)
            if len(found) == limit:
                return EventPage(found, following=str(one.cursor), searched=searched)
        if len(page) < SEARCHED_EVENTS:
            return EventPage(found, searched=searched)
        after = page[-1].cursor
    return EventPage(found, following=str(after), searched=searched)


def _contains(recorded: Recorded, search: str) -> bool:
    return search in recorded.stream.lower() or search in _text(recorded).lower()


def _text(recorded: Recorded) -> str:
    """The data of an event as JSON, as the log holds it."""
    held = recorded.payload
    if not isinstance(held, Encoded):
        return held.model_dump_json()
    return held.data if isinstance(held.data, str) else held.data.decode()


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
    past = core.readmodel.state_at_event
    is_possible = max(at.xid, at.position) < LARGEST_CURSOR
    place = await past.place(run["id"], at) if is_possible else None
    if place is None:
        raise NotFound(f"run {run['name']} has no event at {at}; the list of its events shows all")
    [recorded] = await core.log.events_at([place])
    previous = await past.before(run["id"], at)
    following = await core.log.read(run["id"], after=at, limit=1)
    state = await run_state_at(past, core.log, run["id"], at)
    before = await run_state_at(past, core.log, run["id"], previous) if previous else {}
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
    run, found = await _hops(request)
    shown = [{**asdict(hop), "seconds": (hop.ms_since_previous or 0) / 1000} for hop in found.hops]
    sample, reason = request.path_params["sample"], found.reason
    values = {"run": run, "sample": sample, "hops": shown, "reason": reason}
    return html(request, "hops.html", values)


async def hops_data(request: Request) -> Response:
    """The same hops as JSON."""
    _, found = await _hops(request)
    return ApiResponse({"hops": [hop.to_json() for hop in found.hops], "reason": found.reason})


async def _hops(request: Request) -> tuple[RunJson, Trace]:
    run, _ = await find_run_with_history(request)
    requested = await services(request).lookup.whole_run(run["id"])
    found = await trace(services(request).log, requested, request.path_params["sample"])
    return run, found


ROUTES = [
    PageRoute("/runs/{ref}/events", events, scope="read"),
    PageRoute("/runs/{ref}/events.json", data, scope="read"),
    PageRoute("/runs/{ref}/at/{cursor}", moment, scope="read"),
    PageRoute("/runs/{ref}/at/{cursor}/state.json", moment_data, scope="read"),
    PageRoute("/runs/{ref}/trace/{sample}", hops, scope="read"),
    PageRoute("/runs/{ref}/trace/{sample}/hops.json", hops_data, scope="read"),
]
