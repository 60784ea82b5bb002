"""The wire formats that the gateway speaks, by the path of a request behind its sample.

Clients that put `/v1` behind the base URL themselves (Anthropic's) are served too.
"""

import json
from types import MappingProxyType

from infra.model_api.wire import anthropic, chat_completions, responses
from infra.model_api.wire.request import WireFormat

CHAT_COMPLETIONS = WireFormat(chat_completions.parse, chat_completions.failure)

FORMATS = MappingProxyType(
    {
        "/chat/completions": CHAT_COMPLETIONS,
        "/responses": WireFormat(responses.parse, chat_completions.failure),
        "/messages": WireFormat(anthropic.parse, anthropic.failure),
        "/messages/count_tokens": WireFormat(
            anthropic.parse_count, anthropic.failure, anthropic.count
        ),
    }
)

MODELS = "/models"


def path_of(rest: str) -> str:
    """Return the path of a request behind its sample, without the version."""
    return rest.removeprefix("/v1")


def format_of(path: str) -> WireFormat:
    """Return the wire format of a path, also where the path is not known."""
    return FORMATS.get(path, CHAT_COMPLETIONS)


def models() -> bytes:
    """The list of models: the policy, whatever name a request gives it. The fields are those of both
    OpenAI and Anthropic."""
    policy = {
        "id": "policy",
        "object": "model",
        "created": 0,
        "owned_by": "headrace",
        "type": "model",
        "display_name": "policy",
        "created_at": "1970-01-01T00:00:00Z",
    }
    ends = {"has_more": False, "first_id": "policy", "last_id": "policy"}
    return json.dumps({"object": "list", "data": [policy], **ends}).encode()
