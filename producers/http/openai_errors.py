"""Errors below /v1 in the form of OpenAI's API, which its clients expect there."""

import json

from starlette.responses import Response

from infra.model_api.wire.chat_completions import failure
from infra.model_api.wire.errors import GatewayError
from producers.http.responses import RETRY_AFTER_S

PREFIX = "/v1/"


def openai_error(error: GatewayError) -> Response:
    """The response that an error is. With status 429 or 503, the same request may succeed soon."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else {}
    return Response(
        failure(error), status_code=error.status, media_type="application/json", headers=headers
    )


def in_form_of(path: str, refusal: Response) -> Response:
    """A problem document as the error that clients of a path expect."""
    if not path.startswith(PREFIX):
        return refusal
    document = json.loads(bytes(refusal.body))
    error = GatewayError(refusal.status_code, document["code"].lower(), document["detail"])
    made = openai_error(error)
    for name in ("www-authenticate", "connection", "retry-after"):
        if name in refusal.headers:
            made.headers[name] = refusal.headers[name]
    return made
