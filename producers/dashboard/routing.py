"""Pages as routes. What a page refuses is a page too."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from producers.dashboard.rendering import HEADERS, html
from producers.http.browsers import is_for_browsers
from producers.http.routing import Endpoint, Reach, RouteScope, ScopedRoute
from schemas.errors import CorruptData, NotFound, Refused, TransientError
from schemas.secrets.redact import redact

TITLES = {
    401: "Sign in again",
    403: "Not allowed",
    404: "Not found",
    409: "Not possible now",
    503: "Try again",
}


class PageRoute(ScopedRoute):
    """A route to a page. Errors of users and of the database are shown as a page."""

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        *,
        scope: RouteScope,
        reach: Reach = "workspace",
        methods: Sequence[str] | None = None,
    ) -> None:
        async def answer(request: Request) -> Response:
            try:
                return _protect(await endpoint(request))
            except Refused as error:
                return error_page(request, error.status, error.message)
            except TransientError as error:
                return error_page(request, 503, str(error))
            except CorruptData as error:
                return error_page(request, 500, str(error))
            except UNAVAILABLE_ERRORS:
                return error_page(request, 503, "the database does not answer now; try again")

        super().__init__(path, answer, scope=scope, reach=reach, methods=methods)

    async def refuse(self, detail: str, scope: Scope, receive: Receive, send: Send) -> None:
        await error_page(Request(scope), 403, detail)(scope, receive, send)


class MissingPage(PageRoute):
    """The page for every address where there is nothing. Programs get a problem document instead."""

    def __init__(self) -> None:
        super().__init__("/{path:path}", _refuse, scope="read")

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http" or not is_for_browsers(scope["path"]):
            return Match.NONE, {}
        return super().matches(scope)


async def _refuse(request: Request) -> Response:
    raise NotFound(f"there is nothing at {request.url.path[:200]}")


def _protect(answer: Response) -> Response:
    """The same answer, also with the headers of pages where it does not choose its own."""
    for name, value in HEADERS.items():
        answer.headers.setdefault(name, value)
    return answer


def error_page(request: Request, status: int, message: str) -> Response:
    """The page that says what went wrong and what to do."""
    title = TITLES.get(status, "This did not work")
    return html(request, "error.html", {"title": title, "message": redact(message)}, status=status)
