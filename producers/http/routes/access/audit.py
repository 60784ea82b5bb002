"""The audit list: who asked for what, and whether it was allowed."""

from datetime import UTC, datetime

from starlette.requests import Request

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


ROUTES = [ScopedRoute("/audit", index, scope="admin")]
