"""Which forward pass runs a model, as far as its config.json says.

`lean` is the decoder of `trainer/forward/decoder.py`, which packs the rows of a step and samples many
rows at once. `general` is the model's own module of Transformers: padded rows, in training and where a
few are sampled together.
The trainer decides with the same rules, and compares the logits of both before it uses the lean decoder.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from schemas.models.architectures import ARCHITECTURES, BOUNDED, Architecture

Pass = Literal["lean", "general", "refused"]

NEW_LEAN_RULES = 6
"""The rules (`schemas.learner.RULES`) since which the lean decoder computes more than `FIRST_LEAN`."""
FIRST_LEAN = ("llama", "mistral", "qwen2", "qwen3")
"""The architectures that it has always computed, where no layer has a window."""


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """`why` is empty for the lean decoder."""

    runs: Pass
    why: str = ""


LEAN = ForwardPass("lean")


@dataclass(frozen=True, slots=True)
class Family:
    """A family that the tests train and sample, in a tiny shape. `model_type` is that of its config."""

    name: str
    model_type: str
    runs: ForwardPass = LEAN


TESTED = (
    Family("Gemma 3", "gemma3_text"),
    Family("Gemma 3 with its vision tower", "gemma3"),
    Family("Gemma 3 with bounded logits", "gemma3_text", ForwardPass("general", BOUNDED)),
    Family("GLM-4", "glm"),
    Family("GLM-4-0414", "glm4"),
    Family("Llama 3", "llama"),
    Family("Mistral", "mistral"),
    Family("Mistral with a sliding window", "mistral"),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3"),
    Family("Phi-3 and Phi-4", "phi3"),
    Family(
        "Phi-3 and Phi-4-mini of 128k",
        "phi3",
        ForwardPass("general", "its rotary embedding is scaled by 'longrope'"),
    ),
    Family("Qwen2.5", "qwen2"),
    Family("Qwen3", "qwen3"),
    Family("Qwen3 with a sliding window", "qwen3"),
    Family("SmolLM and SmolLM2", "llama"),
    Family("SmolLM3", "smollm3"),
)


REFUSED = (
    Family(
        "BERT", "bert", ForwardPass("refused", "a later token changes what it predicts before it")
    ),
    Family("Mamba", "mamba", ForwardPass("refused", "it has no key-value cache")),
    Family("T5", "t5", ForwardPass("refused", "Transformers has no causal language model of it")),
)
"""Families that the tests see refused, one for each of the checks when a model is loaded."""


def describe_families() -> list[dict[str, str]]:
    """Each family that the tests know, with what runs it and why, as JSON."""
    return [
        {"name": f.name, "model_type": f.model_type, "runs": f.runs.runs, "why": f.runs.why}
        for f in (*TESTED, *REFUSED)
    ]


def forward_pass(config: Mapping[str, Any]) -> ForwardPass:
    """The forward pass of a model with this config.json, or with Transformers' form of it. A model of a
    family that is in no table is checked when it is loaded, and may be refused then."""
    kind = config.get("model_type")
    if isinstance(kind, str) and (architecture := ARCHITECTURES.get(kind)) is not None:
        obstacle = _obstacle(config, architecture)
        return LEAN if obstacle is None else ForwardPass("general", obstacle)
    known = next((family.runs for family in REFUSED if family.model_type == kind), None)
    return known or ForwardPass("general", f"the lean decoder does not compute {kind!r:.80}")


def lean_since(config: Mapping[str, Any]) -> int:
    """The first rules under which a lean model with this config was lean. Runs that started with earlier
    rules take the general pass."""
    is_first = config.get("model_type") in FIRST_LEAN and not _has_window(config)
    return 1 if is_first else NEW_LEAN_RULES


def has_rope_of_length(config: Mapping[str, Any]) -> bool:
    """Whether a rotary embedding of the model depends on how long the text is."""
    return any(rope in ("dynamic", "longrope") for rope in _rope_types(config))


def _obstacle(config: Mapping[str, Any], architecture: Architecture) -> str | None:
    """Why the lean decoder does not compute a model of one of its architectures, if it does not."""
    if architecture.nests_text:
        text = config.get("text_config")
        config = text if isinstance(text, Mapping) else {}
    types = config.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if isinstance(types, list) and (other := next((t for t in types if t not in known), None)):
        return f"it has layers of the type {other!r:.80}"
    activation = config.get(architecture.activation_key, architecture.activation)
    if activation != architecture.activation:
        return f"its activation is {activation!r:.80}, not {architecture.activation!r}"
    for rope in _rope_types(config):
        if rope not in architecture.ropes:
            return f"its rotary embedding is scaled by {rope!r:.80}"
    return next((why for key, why in architecture.obstacles.items() if config.get(key)), None)


def _has_window(config: Mapping[str, Any]) -> bool:
    if isinstance(types := config.get("layer_types"), list):
        return any(one != "full_attention" for one in types)
    if config.get("model_type") == "mistral":
        return bool(config.get("sliding_window"))
    if not config.get("use_sliding_window"):
        return False
    first, layers = config.get("max_window_layers"), config.get("num_hidden_layers")
    return not (isinstance(first, int) and isinstance(layers, int) and first >= layers)


def _rope_types(config: Mapping[str, Any]) -> Iterator[object]:
    """The kinds of its rotary embeddings: of all layers, or of each type of layer."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return
    nested = [one for one in scaling.values() if isinstance(one, dict)]
    for one in nested or [scaling]:
        yield one.get("rope_type", one.get("type", "default"))
