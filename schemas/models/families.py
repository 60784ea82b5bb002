"""Which forward pass runs a model, as far as its config.json says.

`lean` is the decoder of `trainer/forward/decoder.py`, which packs the rows of a step and samples many
rows at once. `general` is the model's own module of Transformers: padded rows, one sampled at a time.
The trainer decides with the same rules, and compares the logits of both before it uses the lean decoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Pass = Literal["lean", "general", "refused"]

LEAN_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""The `model_type` of the architectures that the lean decoder computes."""
LEAN_ROPES = ("default", "linear", "llama3", "yarn")

WINDOW = "some of its layers attend to a sliding window"


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
    Family("Gemma 3", "gemma3_text", ForwardPass("general", WINDOW)),
    Family(
        "Gemma 3 with its vision tower",
        "gemma3",
        ForwardPass("general", f"{WINDOW}; only its language model is trained"),
    ),
    Family("Llama 3", "llama"),
    Family("Mistral", "mistral"),
    Family("Mistral with a sliding window", "mistral", ForwardPass("general", WINDOW)),
    Family("Qwen2.5", "qwen2"),
    Family("Qwen3", "qwen3"),
    Family("SmolLM and SmolLM2", "llama"),
    Family(
        "SmolLM3",
        "smollm3",
        ForwardPass("general", "some of its layers have no rotary embedding"),
    ),
)


REFUSED = (
    Family(
        "BERT", "bert", ForwardPass("refused", "a later token changes what it predicts before it")
    ),
    Family("Mamba", "mamba", ForwardPass("refused", "it has no key-value cache")),
    Family("T5", "t5", ForwardPass("refused", "Transformers has no causal language model of it")),
)
"""Families that the tests see refused, one for each of the checks when a model is loaded."""


def forward_pass(config: Mapping[str, Any]) -> ForwardPass:
    """The forward pass of a model with this config.json, or with Transformers' form of it. A model of a
    family that is in no table is checked when it is loaded, and may be refused then."""
    kind = config.get("model_type")
    if kind in LEAN_TYPES:
        obstacle = _obstacle(config)
        return LEAN if obstacle is None else ForwardPass("general", obstacle)
    known = next((family.runs for family in REFUSED if family.model_type == kind), None)
    return known or ForwardPass("general", f"the lean decoder does not compute {kind!r}")


def _obstacle(config: Mapping[str, Any]) -> str | None:
    """Why the lean decoder does not compute a model of one of its architectures, if it does not."""
    if _has_window(config):
        return WINDOW
    if (activation := config.get("hidden_act", "silu")) != "silu":
        return f"its activation is {activation!r}, not 'silu'"
    if (rope := _rope_type(config)) not in LEAN_ROPES:
        return f"its rotary embedding is scaled by {rope!r}"
    return None


def _has_window(config: Mapping[str, Any]) -> bool:
    if isinstance(types := config.get("layer_types"), list):
        return any(one != "full_attention" for one in types)
    if config.get("model_type") == "mistral":
        return bool(config.get("sliding_window"))
    if not config.get("use_sliding_window"):
        return False
    first, layers = config.get("max_window_layers"), config.get("num_hidden_layers")
    return not (isinstance(first, int) and isinstance(layers, int) and first >= layers)


def _rope_type(config: Mapping[str, Any]) -> object:
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return "default"
    return scaling.get("rope_type", scaling.get("type", "default"))
