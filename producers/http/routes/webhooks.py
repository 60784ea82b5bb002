"""Webhooks of forges: the one door that a signature opens instead of an API key."""

from starlette.requests import Request
from starlette.responses import Response

from producers.http.responses import ApiResponse, problem
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from producers.webhook.headers import RequestHeaders


async def take(request: Request) -> Response:
    """Take a delivery. 202 means that it is durable."""
    endpoint = services(request).webhooks
    headers = RequestHeaders(request.scope["headers"])
    answer = await endpoint.take(request.path_params["workspace"], headers, request.receive)
    if answer.code is not None:
        closing = {"Connection": "close"} if answer.is_unread else {}
        return problem(answer.status, answer.code, answer.text, headers=closing)
    return ApiResponse({"result": answer.text}, status_code=answer.status)


ROOT_ROUTES = [ScopedRoute("/webhooks/{workspace}", take, scope="open", methods=["POST"])]
