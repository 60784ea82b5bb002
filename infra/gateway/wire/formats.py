"""The wire formats that the gateway speaks, by the path of a request behind its sample.

Clients that put `/v1` behind the base URL themselves (Anthropic's) are served too.
"""

import json
import time
from types import MappingProxyType

from infra.gateway.wire import chat_completions
from infra.gateway.wire.request import WireFormat

CHAT_COMPLETIONS = WireFormat(chat_completions.parse, chat_completions.failure)

FORMATS = MappingProxyType({"/chat/completions": CHAT_COMPLETIONS})

MODELS = "/models"


def path_of(rest: str) -> str:
    """Return the path of a request behind its sample, without the version."""
    return rest.removeprefix("/v1")


def format_of(path: str) -> WireFormat:
    """Return the wire format of a path, also where the path is not known."""
    return FORMATS.get(path, CHAT_COMPLETIONS)


def models() -> bytes:
    """The list of models: the policy, whatever name a request gives it."""
    policy = {
        "id": "policy",
        "object": "model",
        "created": int(time.time()),
        "owned_by": "headrace",
    }
    return json.dumps({"object": "list", "data": [policy], "has_more": False}).encode()
