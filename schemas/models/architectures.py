"""How the architectures that the lean decoder computes differ from Llama's: one table.

The decoder (`trainer/forward/decoder.py`) reads these facts, and never the name of an architecture. What
differs between models of one architecture (sizes, frequencies, which layers have a window) is in their
config. `trainer/forward/decoder.py` reads that when a model is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Activation = Literal["silu", "gelu_pytorch_tanh"]
WindowLayers = Literal["none", "all", "by_type"]
BOUNDED = "it bounds its logits by tanh"


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names of the norms of a layer, None where there is none. `attention` and `mlp` are before
    these parts. The others are after them, before the result is added to the residual."""

    attention: str | None = "input_layernorm"
    after_attention: str | None = None
    mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """The facts of one architecture. The defaults are those of Llama."""

    norms: LayerNorms = field(default_factory=LayerNorms)
    norm_adds_one: bool = False
    """Whether a norm multiplies by 1 + its weight."""
    norms_all_heads: bool = False
    """Whether a norm of queries or keys is over all heads together. If not, it is over each head."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """The modules of a layer that compute queries, keys and values. One module computes all of them."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    activation: Activation = "silu"
    activation_key: str = "hidden_act"
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    """The kinds of rotary embedding whose frequencies are the same for every position and length."""
    rotates_neighbours: bool = False
    """Whether the rotary embedding turns pairs of neighbours, and not the two halves of a head."""
    has_rope_of_type: bool = False
    """Whether each type of layer has its own rotary embedding."""
    skips_rope: bool = False
    """Whether layers have no rotary embedding where `no_rope_layers` of the config is 0."""
    windows: WindowLayers = "none"
    """The layers that attend to a sliding window: all, if the config has one, or those that
    `layer_types` of the config names."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    attention_scale_key: str | None = None
    """The key of the config whose inverse square root scales attention, instead of the head size."""
    nests_text: bool = False
    """Whether the language model is a part: `text_config` of the config, `language_model` of the
    modules."""
    obstacles: Mapping[str, str] = field(default_factory=dict)
    """Keys of the config that ask for something that the decoder does not compute, and what that is."""

    @property
    def prefix(self) -> str:
        """The beginning of the names of the language model's modules."""
        return "model.language_model." if self.nests_text else "model."


LLAMA = Architecture()

_QKV_IN_ONE = ("self_attn.qkv_proj",)
_GATE_UP_IN_ONE = ("mlp.gate_up_proj",)
_FIXED = ("default", "linear", "llama3")
"""Ropes that turn by angles alone. With others, what is not turned would be scaled too."""
_AFTER = LayerNorms(
    attention=None,
    after_attention="post_attention_layernorm",
    mlp=None,
    after_mlp="post_feedforward_layernorm",
)
_GEMMA3 = Architecture(
    norms=LayerNorms(
        after_attention="post_attention_layernorm",
        mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    norm_adds_one=True,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    has_rope_of_type=True,
    windows="by_type",
    scales_embedding=True,
    attention_scale_key="query_pre_attn_scalar",
    obstacles={
        "use_bidirectional_attention": "its tokens attend to later ones",
        "final_logit_softcapping": BOUNDED,
    },
)

ARCHITECTURES = {
    "gemma3": replace(_GEMMA3, nests_text=True),
    "gemma3_text": _GEMMA3,
    "glm": Architecture(gate_up=_GATE_UP_IN_ONE, ropes=_FIXED, rotates_neighbours=True),
    "glm4": Architecture(
        norms=LayerNorms(
            after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"
        ),
        gate_up=_GATE_UP_IN_ONE,
        ropes=_FIXED,
        rotates_neighbours=True,
    ),
    "llama": LLAMA,
    "mistral": Architecture(windows="all"),
    "olmo2": Architecture(norms=_AFTER, norms_all_heads=True),
    "olmo3": Architecture(
        norms=_AFTER, norms_all_heads=True, has_rope_of_type=True, windows="by_type"
    ),
    "phi3": Architecture(
        qkv=_QKV_IN_ONE, gate_up=_GATE_UP_IN_ONE, ropes=("default",), windows="all"
    ),
    "qwen2": Architecture(windows="by_type"),
    "qwen3": Architecture(windows="by_type"),
    "smollm3": Architecture(skips_rope=True, windows="by_type"),
}
"""The architectures that the lean decoder computes, by `model_type`."""
