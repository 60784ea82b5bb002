"""The audit list: who asked for what, and whether it was allowed."""

from collections.abc import AsyncIterator
from dataclasses import asdict
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from producers.http.auth import actor_of
from producers.http.responses import ApiResponse, page_of, page_response
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.errors import InvalidConfig, Issue


async def index(request: Request) -> ApiResponse:
    page = page_of(request)
    rows, total = await services(request).audit.page(
        since=_since(request),
        api_key=request.query_params.get("api_key") or request.query_params.get("token") or None,
        workspace=actor_of(request).workspace,
        organisation=actor_of(request).organisation,
        limit=page.limit,
        offset=page.offset,
    )
    return page_response("audit", rows, total, page)


def _since(request: Request) -> datetime | None:
    """The moment `since` of the query string, with its time zone or in UTC."""
    text = request.query_params.get("since")
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        message = f"must be a time like 2026-01-31T12:00:00Z, got {text[:40]!r}"
        raise InvalidConfig(f"since {message}", issues=(Issue("since", message),)) from error
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


async def export(request: Request) -> Response:
    """All entries with their hashes, the oldest first, and then the heads, as JSON Lines."""
    entries = services(request).audit.export()

    async def lines() -> AsyncIterator[bytes]:
        async for entry in entries:
            yield bytes(ApiResponse(entry).body) + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def verify(request: Request) -> Response:
    """Whether the chains of entries are whole."""
    reports = await services(request).audit.verify()
    return ApiResponse({"chains": {name: asdict(report) for name, report in reports.items()}})


ROUTES = [
    ScopedRoute("/audit", index, scope="admin"),
    ScopedRoute("/audit/export", export, scope="admin", reach="installation"),
    ScopedRoute("/audit/verification", verify, scope="admin", reach="installation"),
]
