"""The HTTP application: routes by resource, errors as problem documents, and authentication before
everything else."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infra.spine.postgres.errors import UNAVAILABLE_ERRORS, DiskFull
from producers.http import costs, evaluation_imports, transfers
from producers.http.auth import Guard
from producers.http.openai_errors import in_form_of
from producers.http.responses import problem, refusal_response, unavailable_response
from producers.http.routes import (
    artifacts,
    checkpoints,
    connections,
    datasets,
    dead_letters,
    deployments,
    evaluation_files,
    evaluations,
    events,
    inference,
    platform,
    retention,
    runs,
    samples,
    secrets,
    shares,
    webhooks,
    workspaces,
)
from producers.http.routes.access import (
    api_keys,
    audit,
    device_login,
    members,
    organisations,
    sessions,
)
from producers.http.routes.history import regrades, verifications
from producers.http.routing import ScopedRoute, scoped_table
from producers.http.services import Services
from producers.http.tracing import Traced
from schemas.errors import CorruptData, Refused, TransientError

logger = logging.getLogger(__name__)

ErrorHandler: TypeAlias = Callable[[Request, Exception], Awaitable[Response]]

RESOURCES = (
    platform,
    runs,
    costs,
    events,
    samples,
    datasets,
    artifacts,
    workspaces,
    organisations,
    connections,
    secrets,
    evaluation_imports,
    evaluations,
    evaluation_files,
    checkpoints,
    deployments,
    verifications,
    regrades,
    dead_letters,
    retention,
    api_keys,
    device_login,
    members,
    sessions,
    shares,
    transfers,
    audit,
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The API of another platform's client. `in_form` is around everything else, so it also gives
    refusals of the guard the form that the client reads."""

    routes: Sequence[ScopedRoute]
    in_form: Callable[[ASGIApp], ASGIApp]


def create_app(
    services: Services,
    *,
    pages: Sequence[ScopedRoute] = (),
    dialects: Sequence[Dialect] = (),
) -> Starlette:
    """The ASGI application, which serves every request with `services`. `pages` are the routes of the
    dashboard. Raises TypeError when a route names no scope."""
    routes = [route for resource in RESOURCES for route in resource.ROUTES]
    roots = [*platform.ROOT_ROUTES, *webhooks.ROOT_ROUTES, *inference.ROOT_ROUTES]
    foreign = [route for dialect in dialects for route in dialect.routes]
    table = [*roots, Mount("/api/v1", routes=routes), *foreign, *pages]
    app = Starlette(
        routes=[*scoped_table(table)],
        middleware=[
            *(Middleware(dialect.in_form) for dialect in dialects),
            Middleware(AnswersAtTheEnd),
            Middleware(Guard, services=services),
            Middleware(Traced),
        ],
        exception_handlers={kind: _in_form(handler) for kind, handler in HANDLERS.items()},
    )
    app.state.services = services
    return app


class AnswersAtTheEnd:
    """Answers a request with 503 that the server cancels, because it stops and does not wait longer. The
    server itself would answer 500, which clients take for a failure of their request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def note(message: Message) -> None:
            nonlocal has_begun
            has_begun = has_begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, note)
        except asyncio.CancelledError:
            if has_begun or scope["type"] != "http":
                raise
            stopping = unavailable_response("the server stops now; try again")
            await in_form_of(scope["path"], stopping)(scope, receive, send)


def _in_form(handler: ErrorHandler) -> ErrorHandler:
    """A handler whose responses have the form that clients of a path expect."""

    async def handle(request: Request, error: Exception) -> Response:
        return in_form_of(request.url.path, await handler(request, error))

    return handle


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return problem(404, "NOT_FOUND", f"there is nothing at {request.url.path}")
    if status == 405:
        return problem(
            405,
            "METHOD",
            f"method {request.method} is not allowed for {request.url.path}",
            headers=error.headers if isinstance(error, HTTPException) else None,
        )
    return problem(status, "HTTP", str(error))


async def _refused_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, Refused):
        raise error
    return refusal_response(error)


async def _transient_error(_: Request, error: Exception) -> Response:
    return unavailable_response(str(error))


async def _database_unavailable(request: Request, error: Exception) -> Response:
    logger.warning("%s %s: %s", request.method, request.url.path, error, exc_info=error)
    if isinstance(error, DiskFull):
        return unavailable_response(DiskFull.PLAIN)
    return unavailable_response("the database does not answer now; try again")


async def _corrupt_data(_: Request, error: Exception) -> Response:
    return problem(500, "CORRUPT", str(error))


async def _internal_error(request: Request, error: Exception) -> Response:
    """The problem document for an error that no other handler caught. Starlette raises the error again
    after this response, so that the server logs its traceback."""
    del error
    return problem(500, "INTERNAL", f"{request.method} {request.url.path} failed; see the log")


HANDLERS: dict[type[Exception], ErrorHandler] = {
    HTTPException: _http_error,
    Refused: _refused_error,
    TransientError: _transient_error,
    CorruptData: _corrupt_data,
    **dict.fromkeys(UNAVAILABLE_ERRORS, _database_unavailable),
    Exception: _internal_error,
}
