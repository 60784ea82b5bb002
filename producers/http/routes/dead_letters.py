"""`/dead-letters`: messages that a consumer could not process, with their bytes, headers, cause and
trace."""

import base64
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from producers.core.dead_letters import Letter
from producers.http.requests import body_of
from producers.http.responses import ApiResponse, page_of, page_response
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.errors import InvalidConfig, Issue

STATUSES = ("waiting", "all")


async def index(request: Request) -> Response:
    status = request.query_params.get("status") or "waiting"
    if status not in STATUSES:
        message = f"must be one of {', '.join(STATUSES)}, got {status!r}"
        raise InvalidConfig(f"status {message}", issues=(Issue("status", message),))
    page = page_of(request)
    rows, total = await services(request).readmodel.letters.page(
        page, all_of_them=status == "all", about=request.query_params.get("about") or None
    )
    return page_response("dead_letters", rows, total, page)


async def show(request: Request) -> Response:
    found = await services(request).dead_letters.show(request.path_params["ref"])
    return ApiResponse({"dead_letter": _to_json(found)})


async def redrive(request: Request) -> Response:
    await body_of(request, ())
    core = services(request)
    recorded = await core.dead_letters.redrive(request.path_params["ref"])
    await core.readmodel.caught_up(recorded.cursor)
    return ApiResponse(
        {"dead_letter": _to_json(await core.dead_letters.show(request.path_params["ref"]))}
    )


def _to_json(letter: Letter) -> Mapping[str, object]:
    event = letter.event
    return {
        "id": letter.id,
        "consumer": event.consumer,
        "message_id": event.message_id,
        "message_type": event.message_type,
        "message_stream": event.message_stream,
        "message_version": event.message_version,
        "about": event.about,
        "cause": event.cause,
        "trace": event.trace,
        "traceparent": event.traceparent,
        "headers": event.headers,
        "pauses": event.pauses,
        "created_at": letter.at,
        "redriven_at": letter.redriven_at,
        "size": len(letter.data),
        "bytes_base64": base64.b64encode(letter.data).decode(),
    }


ROUTES = [
    ScopedRoute("/dead-letters", index, scope="admin", reach="installation"),
    ScopedRoute("/dead-letters/{ref}", show, scope="admin", reach="installation"),
    ScopedRoute(
        "/dead-letters/{ref}/redrive",
        redrive,
        scope="admin",
        reach="installation",
        methods=["POST"],
    ),
]
