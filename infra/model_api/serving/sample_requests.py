"""Turns a client's request to a deployment into requests to the engine.

Unlike a sample of a run, a deployment obeys temperature, top_p and seed. Without a seed each answer is
another draw.
"""

import secrets
from collections.abc import Callable, Mapping
from typing import Protocol

from infra.model_api.serving.call import ServingCall, WireName
from infra.model_api.wire import chat_completions, completions
from infra.model_api.wire.errors import invalid, unsupported
from infra.model_api.wire.request import ModelRequest, WireRequest
from schemas.sampling import DrawKey, SampleRequest, SamplingParams

MOST_PROMPT_TOKENS = 1 << 20
"""Not a limit: the context of the model is smaller."""
MOST_NEW_TOKENS = 8192
"""Of an answer whose request does not say how long it may be."""
SMALLEST_TOP_P = 1e-6
SMALLEST_TEMPERATURE = 1e-6
"""Of a temperature that is not 0. Logits that are divided by a smaller one may not be finite."""

NOT_OBEYED: dict[str, tuple[object, ...]] = {"top_k": (-1, 0), "min_p": (0,)}
"""Parameters that the engines do not have, with the values that change nothing."""


class DrawingOptions(Protocol):
    """The part of a parsed request that says how its tokens are drawn."""

    @property
    def temperature(self) -> float | None: ...

    @property
    def top_p(self) -> float | None: ...

    @property
    def model_extra(self) -> Mapping[str, object] | None: ...


class ServedRequest(WireRequest, Protocol):
    """A parsed request, with what it says about drawing."""

    @property
    def request(self) -> DrawingOptions: ...


PARSERS: dict[WireName, Callable[[bytes], ServedRequest]] = {
    "chat": chat_completions.parse,
    "completions": completions.parse,
}


def parse_request(wire: WireName, body: bytes) -> ServedRequest:
    """Parse the body of a client. Raises GatewayError (400)."""
    parsed = PARSERS[wire](body)
    for name, nothing in NOT_OBEYED.items():
        value = (parsed.request.model_extra or {}).get(name)
        if value is not None and value not in nothing:
            raise unsupported(name, "not supported; use temperature or top_p")
    return parsed


def sample_requests(call: ServingCall, parsed: ServedRequest) -> list[SampleRequest]:
    """The requests to the engine, one for each answer. Raises GatewayError (400)."""
    wanted, seed = parsed.model_request, _seed(parsed.request)
    first = SampleRequest(
        model=call.served.model,
        policy=call.policy,
        lora_alpha=call.served.lora_alpha,
        lora_scaling=call.served.lora_scaling,
        params=_params(call, parsed.request, wanted, seed or 0),
        key=DrawKey(
            purpose="serve",
            step=0,
            slot=secrets.randbits(31) if seed is None else 0,
            replacement=0,
            sample=0,
        ),
        messages=wanted.messages,
        tools=wanted.tools,
        pieces=wanted.pieces,
        likeliest=wanted.likeliest,
        constraint=wanted.constraint,
    )
    prompts = [one for one in wanted.prompts or (None,) for _ in range(wanted.num_choices)]
    return [
        first.model_copy(update={"prompt": prompt, "occurrence": prompts[:number].count(prompt)})
        for number, prompt in enumerate(prompts)
    ]


def _params(
    call: ServingCall, drawing: DrawingOptions, wanted: ModelRequest, seed: int
) -> SamplingParams:
    temperature = 1.0 if drawing.temperature is None else drawing.temperature
    if temperature > 0:
        temperature = max(SMALLEST_TEMPERATURE, temperature)
    top_p = 1.0 if drawing.top_p is None else drawing.top_p
    return SamplingParams(
        temperature=temperature,
        top_p=max(SMALLEST_TOP_P, top_p),
        max_prompt_tokens=MOST_PROMPT_TOKENS,
        max_new_tokens=wanted.max_tokens or MOST_NEW_TOKENS,
        stop=wanted.stop,
        seed=seed,
        date=call.served.date,
    )


def _seed(drawing: DrawingOptions) -> int | None:
    seed = (drawing.model_extra or {}).get("seed")
    if seed is None:
        return None
    if not isinstance(seed, int) or isinstance(seed, bool) or abs(seed) >= 1 << 63:
        raise invalid("seed", "must be a whole number of at most 64 bits")
    return seed % (1 << 31)
