"""Gives every response below `/api/cli` the form that the client reads, also those of the guard, the
router and the handlers of errors. Refuses versions of the client that are too old, if a setting asks
for that."""

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from producers.dialects.osmosis.errors import error_of_problem, error_response
from producers.http.responses import ApiResponse

PREFIX = "/api/cli"
PROBLEM = "application/problem+json"

CLIENT_VERSION = "x-osmosis-cli-version"
VERSION_STATUS = "X-Osmosis-Version-Status"
NUMBER = re.compile(r"[0-9]{1,6}")


class ClientForm:
    """ASGI middleware that turns problem documents below the prefix into errors of the client. With
    `least_version`, older clients are asked to upgrade, and all others are served."""

    def __init__(self, app: ASGIApp, *, least_version: str | None = None) -> None:
        self._app = app
        self._least = least_version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_of_client(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        version = headers.get(CLIENT_VERSION)
        if self._least is not None and version is not None and _is_older(version, self._least):
            await _upgrade_required(version, self._least)(scope, receive, send)
            return
        answer = _Answer(scope, receive, send, has_api_key="authorization" in headers)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            if not answer.has_begun:
                await answer.fail(scope["method"])
            raise  # the server logs it


class _Answer:
    """The response to one request. A problem document is held back until it is complete."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, has_api_key: bool) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._has_api_key = has_api_key
        self._problem: tuple[int, Headers] | None = None
        self._document = bytearray()
        self.has_begun = False

    async def send(self, message: Message) -> None:
        """Send a message of the application on, in the form of the client."""
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[VERSION_STATUS] = "current"
            headers = Headers(raw=message["headers"])
            if headers.get("content-type", "").startswith(PROBLEM):
                self._problem = message["status"], headers
                return
        elif self._problem is not None:
            self._document += message.get("body", b"")
            if not message.get("more_body"):
                await self._send_error(*self._problem)
            return
        self.has_begun = True
        await self._send(message)

    async def fail(self, method: str) -> None:
        """Answer a request that raised an error nobody expected."""
        detail = f"{method} {self._scope['path']} failed; see the log of the server"
        await self._respond(error_response(500, "INTERNAL", detail))

    async def _send_error(self, status: int, headers: Headers) -> None:
        document = bytes(self._document)
        await self._respond(
            error_of_problem(status, document, headers=headers, has_api_key=self._has_api_key)
        )

    async def _respond(self, response: Response) -> None:
        self.has_begun = True
        response.headers[VERSION_STATUS] = "current"
        response.headers["X-Content-Type-Options"] = "nosniff"
        await response(self._scope, self._receive, self._send)


def is_of_client(path: str) -> bool:
    """Whether a path is one of this client's API."""
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def _is_older(version: str, least: str) -> bool:
    """Whether a version comes before another one. A text without a number comes before all."""
    return _numbers(version) < _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    found = [int(one) for one in NUMBER.findall(version[:60])[:3]]
    return (*found, 0, 0, 0)[:3]


def _upgrade_required(version: str, least: str) -> Response:
    message = (
        f"this server needs osmosis-ai {least} or newer, and this is {version[:40]}; "
        "run: osmosis upgrade"
    )
    content = {"status": "unsupported", "message": message, "code": "UPGRADE_REQUIRED"}
    headers = {VERSION_STATUS: "unsupported", "Connection": "close"}
    return ApiResponse(content, status_code=426, headers=headers)
