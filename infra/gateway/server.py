"""The gateway's HTTP server, inside the worker: every sample its own OpenAI-compatible endpoint.

POST /v1/samples/<sample>/chat/completions     user code, with that sample's key
POST /internal/sample                          the API's checkpoint chat, with the worker's key
"""

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn
from pydantic import ValidationError

from infra.gateway.openai import answer, chunks, failure, parse
from infra.gateway.sessions import GatewayError, GatewaySession, new_key
from schemas.errors import CorruptData, FailureCategory, Refused, TransientError, UserCodeError
from schemas.ids import sample_id
from schemas.sampling import Sampler, SampleRequest
from schemas.specs import GroupSpec

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LONGEST_BODY = 8 << 20

KEPT_SESSIONS = 4096
"""Beyond this many, closed sessions are forgotten: late callers then get 404, not 408."""
PREFIX = "/v1/samples/"
SUFFIX = "/chat/completions"

STATUS = {
    FailureCategory.PROMPT_TOO_LONG: (400, "context_length_exceeded"),
    FailureCategory.VALIDATION: (400, "invalid_request"),
}


class HttpGateway:
    """`infra.externals.Gateway` on 127.0.0.1, on a port of its own."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._sessions: dict[str, GatewaySession] = {}
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._url = ""
        self.internal_key = new_key()

    @property
    def internal_url(self) -> str:
        return f"{self._url}/internal/sample"

    def open(self, spec: GroupSpec, index: int, *, deadline_s: float) -> GatewaySession:
        sample = sample_id(spec.group_key.id, index)
        session = GatewaySession(
            spec=spec,
            index=index,
            base_url=f"{self._url}{PREFIX}{sample}",
            api_key=new_key(),
            deadline_s=deadline_s,
        )
        if len(self._sessions) > KEPT_SESSIONS:
            self._sessions = {k: s for k, s in self._sessions.items() if not s.closed}
        self._sessions[sample] = session
        return session

    async def start(self) -> None:
        """Listen; returns once requests are taken."""
        config = uvicorn.Config(
            self._app,
            host="127.0.0.1",
            port=0,
            log_config=None,
            access_log=False,
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            backlog=4096,
            timeout_keep_alive=120,
            timeout_graceful_shutdown=1,
        )
        self._server = server = uvicorn.Server(config)
        # The worker has its own signal handlers; uvicorn's would take them over.
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]  # has its shape
        self._task = asyncio.ensure_future(server.serve())
        while not server.started:
            if self._task.done():
                self._task.result()
                raise TransientError("the gateway could not listen on 127.0.0.1")
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"

    async def aclose(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.gather(self._task, return_exceptions=True)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            body = await _body(receive)
            if scope["path"] == "/internal/sample":
                await _reply(send, 200, await self._internal(scope, body))
                return
            await self._complete(scope, body, send)
        except GatewayError as error:
            await _reply(send, error.status, failure(error))

    async def _complete(self, scope: Scope, body: bytes, send: Send) -> None:
        session = self._session(scope)
        session.authorize(_key(scope))
        request = parse(body)
        messages = tuple(message.plain() for message in request.messages)
        noted, wanted = session.ask(messages, max_tokens=request.limit)
        try:
            async with asyncio.timeout(max(0.0, session.left_s())):
                turn = await self._sample(wanted)
        except TimeoutError as error:
            raise GatewayError(408, "deadline_exceeded", "this sample's time is over") from error
        except GatewayError as error:
            # What the platform failed at is no fact about the sample: it will run again.
            session.interrupted |= error.status >= 500
            raise
        session.answer(noted, turn)
        request_id = f"chatcmpl-{len(session.asked)}"
        if not request.stream:
            await _reply(send, 200, answer(turn, request, request_id=request_id))
            return
        await _start(send, 200, b"text/event-stream")
        for chunk in chunks(turn, request, request_id=request_id):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _session(self, scope: Scope) -> GatewaySession:
        path: str = scope["path"]
        if scope["method"] != "POST" or not (path.startswith(PREFIX) and path.endswith(SUFFIX)):
            raise GatewayError(404, "not_found", f"there is no {scope['method']} {path} here")
        session = self._sessions.get(path[len(PREFIX) : -len(SUFFIX)])
        if session is None:
            raise GatewayError(404, "unknown_sample", "there is no such sample on this worker")
        return session

    async def _sample(self, request: SampleRequest) -> Any:
        try:
            return await self._sampler.sample(request)
        except UserCodeError as error:
            status, code = STATUS.get(error.category, (500, "internal_error"))
            raise GatewayError(status, code, error.message) from error
        except TransientError as error:
            raise GatewayError(503, "engine_gone", str(error)) from error
        except (Refused, CorruptData) as error:
            raise GatewayError(400, "engine_refused", str(error)) from error

    async def _internal(self, scope: Scope, body: bytes) -> bytes:
        if not hmac.compare_digest(_key(scope).encode(), self.internal_key.encode()):
            raise GatewayError(401, "invalid_api_key", "this key is not this worker's key")
        try:
            request = SampleRequest.model_validate_json(body)
        except ValidationError as error:
            raise GatewayError(400, "invalid_request", str(error)) from error
        turn = await self._sample(request)
        return bytes(turn.model_dump_json(), "utf-8")


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise GatewayError(400, "disconnected", "the client went away")
        body += message.get("body", b"")
        if len(body) > LONGEST_BODY:
            raise GatewayError(413, "too_large", f"a request may have {LONGEST_BODY} bytes")
        if not message.get("more_body"):
            return bytes(body)


def _key(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value).decode("latin-1").removeprefix("Bearer ").strip()
    return ""


async def _start(send: Send, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _reply(send: Send, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
