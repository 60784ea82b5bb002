"""Opens a trace span for each request that changes something, as a child of the sender's span."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from infra import telemetry
from producers.http.auth import SIGNED_PATHS


class Traced:
    """ASGI middleware that opens the spans. Requests that only read get none, because no event follows
    from them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        name = telemetry.REQUEST.format(method=scope["method"], path=scope["path"])
        # The sender of a webhook is not trusted to name the trace that its push belongs to.
        is_foreign = scope["path"].startswith(SIGNED_PATHS)
        parent = None if is_foreign else Headers(scope=scope).get(telemetry.PARENT)
        with telemetry.span(name, parent=parent):
            await self._app(scope, receive, send)
