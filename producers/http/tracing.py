"""A span for each request that changes something, under the context of whoever sent it."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from infra import telemetry


class Traced:
    """ASGI middleware. Reading is not traced: it leads to nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        name = telemetry.REQUEST.format(method=scope["method"], path=scope["path"])
        with telemetry.span(name, parent=Headers(scope=scope).get(telemetry.PARENT)):
            await self._app(scope, receive, send)
