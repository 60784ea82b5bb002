"""Deployed models, below /v1 as OpenAI's API has them.

The control process holds no model. It finds the deployment of a name, and forwards the request to a
process that serves (`infra/model_api/serving/`), which parses it, samples, counts and writes the answer.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from infra.model_api.gateway.bodies import LONGEST_BODY, check_braces
from infra.model_api.gateway.bytes_in_flight import HeldRequest
from infra.model_api.serving.call import ServingCall, WireName
from infra.model_api.serving.client import AWAY, ServedAnswer
from infra.model_api.serving.directory import ModelEntry
from infra.model_api.wire.chat_completions import failure
from infra.model_api.wire.errors import GatewayError
from producers.http.auth import actor_of, is_still_valid
from producers.http.openai_errors import in_form_of, openai_error
from producers.http.responses import RETRY_AFTER_S, ApiResponse, problem
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.errors import TransientError

logger = logging.getLogger(__name__)

EVENTS = "text/event-stream"
BROKEN = "the process that serves deployments ended within this answer; ask again"
REVOKED = "the API key is not valid any more"
LOOK_S = 1.0
"""How often an answer looks whether its API key is still valid."""
MOST_BYTES = LONGEST_BODY - (1 << 20)
LONGEST_NAME = 600


class ModelRoute(ScopedRoute):
    """A route of OpenAI's API."""

    async def refuse(self, detail: str, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = problem(403, "FORBIDDEN", detail, headers={"Connection": "close"})
        await in_form_of(scope["path"], refusal)(scope, receive, send)


async def models(request: Request) -> Response:
    """The models that the sender may use."""
    entries = await services(request).model_directory.all_models()
    return ApiResponse({"object": "list", "data": [_model(entry) for entry in entries]})


async def model(request: Request) -> Response:
    name = request.path_params["model"]
    entry = await services(request).model_directory.find_model(name)
    return openai_error(_unknown(name)) if entry is None else ApiResponse(_model(entry))


async def chat_completions(request: Request) -> Response:
    return await _infer(request, "chat")


async def completions(request: Request) -> Response:
    return await _infer(request, "completions")


async def _infer(request: Request, wire: WireName) -> Response:
    """Forward a request to the deployment that it names."""
    in_flight, actor = services(request).inference_bytes, actor_of(request)
    try:
        with in_flight.hold(actor.api_key, organisation=actor.organisation) as held:
            return await infer(request, wire, await _body_of(request, held))
    except GatewayError as error:
        return openai_error(error)


async def infer(request: Request, wire: WireName, body: bytes) -> Response:
    """Forward a body, on behalf of the actor of a request, to the deployment that it names."""
    core = services(request)
    try:
        name = _model_name(body)
        entry = await core.model_directory.find_model(name)
        if entry is None:
            raise _unknown(name)
        call = ServingCall(
            api_key=actor_of(request).api_key, wire=wire, served=entry.served, is_base=entry.is_base
        )
        answer = await _while_connected(request, core.serving.ask(call, body))
    except TransientError as error:
        return openai_error(GatewayError(503, "unavailable", str(error)))
    except GatewayError as error:
        return openai_error(error)
    return await _forward(request, answer)


async def _forward(request: Request, answer: ServedAnswer) -> Response:
    """The answer of a process that serves, as it arrives. When the process ends before its answer has
    begun to arrive, the client may try again."""
    chunks = answer.chunks
    try:
        first = await anext(chunks, b"")
    except httpx.TransportError:
        await answer.aclose()
        return openai_error(GatewayError(503, "unavailable", AWAY))
    except BaseException:
        await answer.aclose()
        raise
    headers = {"Cache-Control": "no-store"}
    if answer.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return StreamingResponse(
        _rest_of(request, answer, first),
        status_code=answer.status,
        media_type=answer.content_type,
        headers=headers,
    )


async def _rest_of(request: Request, answer: ServedAnswer, first: bytes) -> AsyncIterator[bytes]:
    """The chunks of an answer. A stream that breaks off, or whose API key was revoked, ends with an
    error that clients know."""
    looked_at, is_stream = time.monotonic(), answer.content_type == EVENTS
    try:
        yield first
        async for chunk in answer.chunks:
            if is_stream and time.monotonic() - looked_at >= LOOK_S:
                looked_at = time.monotonic()
                if not await _may_go_on(request):
                    yield _error_event(GatewayError(401, "unauthorized", REVOKED))
                    return
            yield chunk
    except httpx.TransportError as error:
        logger.warning("a process that serves ended within an answer: %s", error)
        if not is_stream:
            raise
        yield _error_event(GatewayError(503, "unavailable", BROKEN))
    finally:
        await answer.aclose()


async def _may_go_on(request: Request) -> bool:
    """Whether the API key of a request is still valid, as far as is known now."""
    try:
        return await is_still_valid(request)
    except TransientError:
        return True


def _error_event(error: GatewayError) -> bytes:
    return b"data: " + failure(error) + b"\n\n"


async def _while_connected(request: Request, asking: Any) -> ServedAnswer:
    """Await an answer. Raises GatewayError when the client disconnects before it begins."""
    asked = asyncio.ensure_future(asking)
    leaving = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((asked, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            raise GatewayError(400, "disconnected", "the client disconnected")
        answer: ServedAnswer = asked.result()
        return answer
    finally:
        for task in (asked, leaving):
            if not task.done():
                task.cancel()
        await asyncio.gather(asked, leaving, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body_of(request: Request, held: HeldRequest) -> bytes:
    """The body. Raises GatewayError (413) when it is too large, and (429 or 503) when it is too much for
    now."""
    length = int(request.headers.get("content-length", "0"))
    if length > MOST_BYTES:
        raise _too_large()
    held.check_room(length)
    data = bytearray()
    async for chunk in request.stream():
        held.count_received(len(chunk))
        data += chunk
        if len(data) > MOST_BYTES:
            raise _too_large()
    check_braces(data)
    return bytes(data)


def _too_large() -> GatewayError:
    return GatewayError(413, "too_large", f"the body has more than {MOST_BYTES} bytes")


def _model_name(body: bytes) -> str:
    """The name of the model in a body. Raises GatewayError (400)."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise GatewayError(400, "invalid_request", f"the body is not JSON: {error}") from error
    name = values.get("model") if isinstance(values, dict) else None
    if not isinstance(name, str) or not name:
        text = "model: must be the name of a deployed model; GET /v1/models lists them"
        raise GatewayError(400, "invalid_request", text, parameter="model")
    return name


def _unknown(name: str) -> GatewayError:
    return GatewayError(
        404,
        "model_not_found",
        f"there is no model {name[:LONGEST_NAME]!r}; GET /v1/models lists the deployed models",
        parameter="model",
    )


def _model(entry: ModelEntry) -> dict[str, object]:
    served = entry.served
    made: dict[str, object] = {
        "id": entry.name,
        "object": "model",
        "created": 0,
        "owned_by": "headrace",
    }
    if not entry.is_base:
        made |= {"root": served.base_name, "parent": served.base_name, "checkpoint": served.ref}
    return made


ROOT_ROUTES = [
    ModelRoute("/v1/models", models, scope="inference"),
    ModelRoute("/v1/models/{model:path}", model, scope="inference"),
    ModelRoute("/v1/chat/completions", chat_completions, scope="inference", methods=["POST"]),
    ModelRoute("/v1/completions", completions, scope="inference", methods=["POST"]),
]
