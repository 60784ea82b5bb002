"""Parameters of requests that change nothing here: which are accepted, and which are refused by name.

Every parameter of a wire format is obeyed, accepted because it does not concern what is sampled, or
refused. How tokens are drawn (temperature, top_p, top_k, min_p, seed) belongs to the run, because the
recorded logprobs must be those of the policy that is trained, and its draws must be repeatable. So these
are accepted and not used.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from infra.model_api.wire.errors import GatewayError, unsupported

DRAWING = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})


def check_extra(
    extra: Mapping[str, object] | None,
    *,
    labels: frozenset[str],
    refused: Mapping[str, str],
    nothing: Mapping[str, tuple[object, ...]],
) -> None:
    """Raise GatewayError unless each parameter is one of `labels`, which are accepted with any value, or
    null, or has a value in `nothing`. `refused` says why the others are refused."""
    for name, value in (extra or {}).items():
        if name in labels or name in DRAWING:
            continue
        if name in refused:
            if value is None or value in nothing.get(name, ()):
                continue
            raise unsupported(name, refused[name])
        shown = name[:64]
        raise GatewayError(
            400, "unknown_parameter", f"{shown}: unknown parameter; leave it out", parameter=shown
        )


def invalid_request(error: ValidationError, known: frozenset[str]) -> GatewayError:
    """Return the refusal of a body, which names the place of its first mistake. Names that are not
    `known` are left out, because they come from the client or are those of our types."""
    first: Any = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"] if part in known or type(part) is int)
    name = str(first["loc"][0])[:64] if first["loc"] else None
    return GatewayError(
        400, "invalid_request", f"{where or 'the body'}: {first['msg']}", parameter=name
    )


def field_names(*models: type[BaseModel]) -> frozenset[str]:
    """Return the names of the fields of these models, which an error may show."""
    return frozenset(name for model in models for name in model.model_fields)
