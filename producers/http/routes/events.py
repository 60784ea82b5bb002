"""The events of a run, as a page of CloudEvents or as a stream of server-sent events.

The id of each server-sent event is a cursor, so `Last-Event-ID` continues exactly where a
connection broke. A stream ends after the run's last event. A client that connects again then gets
204, which tells a browser to stop.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from infra.spine.ports.event_log import Cursor, Recorded
from infra.spine.postgres.history import as_of
from producers.http.auth import is_still_valid
from producers.http.responses import ApiResponse, number
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.envelope import CloudEvent, current_type
from schemas.errors import InvalidConfig, Issue
from schemas.events import EVENT_TYPES

BATCH = 200
COMMENT_EVERY_S = 15.0
"""How often a stream without events sends a comment, to show that it is alive."""


def cloud_event(recorded: Recorded) -> CloudEvent:
    """An event in the form that the API and the command line use."""
    event = recorded.event
    return CloudEvent(
        id=recorded.id,
        type=event.type,
        subject=recorded.stream,
        time=recorded.time,
        dataversion=event.version,
        streamversion=recorded.version,
        runid=event.run_id,
        correlationid=recorded.correlation,
        causationid=recorded.causation,
        traceparent=recorded.traceparent,
        actor=recorded.actor,
        cursor=str(recorded.cursor),
        data=event.model_dump(mode="json"),
    )


async def events(request: Request) -> Response:
    """A page of events as JSON, or a stream of events when the client accepts `text/event-stream`."""
    run = (await services(request).lookup.run(request.path_params["ref"])).run
    types = parse_types(request)
    if "text/event-stream" in request.headers.get("accept", ""):
        return await _stream(request, run, types)
    after = parse_cursor(request.query_params.get("after"))
    limit = number(request, "limit", default=100, least=1, most=1000)
    found = await services(request).log.read(run, after=after, limit=limit, types=types)
    following = str(found[-1].cursor if found else after)
    page = [cloud_event(recorded).model_dump(mode="json") for recorded in found]
    return ApiResponse({"events": page, "next": following})


async def _stream(request: Request, run: str, types: Sequence[str] | None) -> Response:
    value = request.headers.get("last-event-id") or request.query_params.get("after")
    after = parse_cursor(value)
    log = services(request).log
    if not await log.reaches(after):
        after = Cursor()  # the database lost transactions, so the cursor means nothing
    first = await log.read(run, after=after, limit=BATCH, types=types)
    if not first and value and await _has_ended(request, run):
        return Response(status_code=204)
    return StreamingResponse(
        _follow(request, run, first, after, types),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _follow(
    request: Request,
    run: str,
    found: Sequence[Recorded],
    after: Cursor,
    types: Sequence[str] | None,
) -> AsyncIterator[str]:
    core, silent_s, over = services(request), 0.0, False
    history_epoch = core.log.history_epoch
    yield ": headrace\n\n"
    while await is_still_valid(request):
        for recorded in found:
            yield _format_event(recorded)
        if found:
            after, silent_s = found[-1].cursor, 0.0
        elif over:
            return
        else:
            # Events that came between the read above and this check are read before the end.
            over = await _has_ended(request, run)
            await asyncio.sleep(0 if over else core.slow_poll_s)
            silent_s += core.slow_poll_s
        if silent_s >= COMMENT_EVERY_S:
            yield ": still here\n\n"
            silent_s = 0.0
        if history_epoch != core.log.history_epoch:
            history_epoch, after = (
                core.log.history_epoch,
                Cursor(),
            )  # the client reads everything again
        with as_of(history_epoch):
            found = await core.log.read(run, after=after, limit=BATCH, types=types)


def _format_event(recorded: Recorded) -> str:
    data = json.dumps(cloud_event(recorded).model_dump(mode="json"), separators=(",", ":"))
    return f"id: {recorded.cursor}\nevent: {recorded.event.type}\ndata: {data}\n\n"


async def _has_ended(request: Request, run: str) -> bool:
    """Whether the run has ended, which means that its last event closed its gate."""
    closing = [kind for kind, event in EVENT_TYPES.items() if event.gate == "closed"]
    log = services(request).log
    found = await log.read(run, after=Cursor(), limit=10, types=closing)
    return any(recorded.event.stream == f"run-{run}" for recorded in found)


def parse_cursor(text: str | None) -> Cursor:
    """The cursor in a query; the beginning without one. Raises InvalidConfig."""
    if not text:
        return Cursor()
    try:
        return Cursor.parse(text)
    except ValueError as error:
        message = f"{text[:40]!r} is not a cursor of this API; use one that a former answer gave"
        raise InvalidConfig(message, issues=(Issue("after", message),)) from error


def parse_types(request: Request) -> list[str] | None:
    """The types of events that a request wants; None for all. Raises InvalidConfig."""
    value = request.query_params.get("types")
    if not value:
        return None
    types = value.split(",")
    unknown = [kind for kind in types if kind not in EVENT_TYPES]
    if unknown:
        message = f"{unknown[0]!r} is not a type of event; use one of those in docs/events.md"
        raise InvalidConfig(message, issues=(Issue("types", message),))
    return [current_type(kind) for kind in types]


ROUTES = [ScopedRoute("/runs/{ref}/events", events, scope="read")]
