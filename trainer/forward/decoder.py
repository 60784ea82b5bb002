"""A lean forward pass for decoders like Llama. Where an architecture differs from it is a fact of the
table in `schemas/models/architectures.py`.

On small models Transformers' modules cost more than their arithmetic. This is the same arithmetic in
plain functions over named tensors. Learner and sampler both use it, so they cannot differ. Tokens are
flat: no padding reaches a matrix product. Attention is a callback, because that is the only difference
between learner, prompt and decoding step. A model runs this way only after `matches_transformers` has
compared it with Transformers. Other models take `trainer/forward/transformers_pass.py`.

Legend: N tokens (flat), H hidden, A query heads, K key heads, D head size, O outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from schemas.models.architectures import ARCHITECTURES, LLAMA, Architecture
from schemas.models.families import LEAN, forward_pass, lean_since
from trainer.forward.lm_head import WIDE, logits_of
from trainer.forward.ops import DIRECT, Forward, Steps
from trainer.forward.weights import DOWN, OUT, trainable_view
from trainer.model.base import Base
from trainer.model.lora_names import Scaling


class Weights(Protocol):
    """The weights that a forward pass reads."""

    def tensor(self, name: str) -> torch.Tensor | None: ...
    def project(self, x_N_H: torch.Tensor, modules: Sequence[str]) -> tuple[torch.Tensor, ...]: ...


Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q_N_A_D, k_N_K_D, v_N_K_D) -> attended_N_AD. The caller decides which tokens see which."""


Turn = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of a rotary embedding."""


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """A rotary embedding: its frequencies (D / 2), 0 for what it does not turn, and the factor of cos
    and sin."""

    inverse_frequencies: torch.Tensor
    scale: float

    def rotation(self, positions_N: torch.Tensor) -> Turn:
        """cos and sin, (N, 1, D) each. The embedding swaps the halves of a head: (x1, x2) -> (-x2, x1).
        sin includes the sign, so that the swap is a plain roll."""
        half = positions_N[:, None].float() * self.inverse_frequencies
        angles = torch.cat((half, half), dim=-1)[:, None, :]
        sin = angles.sin() * self.scale
        sin[..., : len(self.inverse_frequencies)].neg_()
        return angles.cos() * self.scale, sin


@dataclass(frozen=True, slots=True, eq=False)
class LayerKind:
    """In which way a layer attends. `window` is how many tokens a token sees, itself included."""

    rope: Rope | None
    window: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """The shape of a model, with functions that compute its passes. The weights are passed to each
    call."""

    architecture: Architecture
    layers: tuple[LayerKind, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rotary_dim: int
    """How many numbers of a head the rotary embedding turns."""
    query_scale: float | None = None
    """The factor of queries, where attention is not scaled by the head size."""
    since_rules: int = 1
    """The first rules under which such a model ran here (`schemas.models.families`)."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def groups(self) -> int:
        """The number of query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(layer.window for layer in self.layers)

    @property
    def embedding(self) -> str:
        """The name of the weight of the embedding."""
        return f"{self.architecture.prefix}embed_tokens.weight"

    @property
    def is_plain(self) -> bool:
        """Whether each layer is one of Llama, without a window. The fused passes compute only these."""
        rope = self.layers[0].rope
        return (
            replace(self.architecture, windows=LLAMA.windows) == LLAMA
            and rope is not None
            and all(layer.rope is rope and layer.window is None for layer in self.layers)
        )

    @property
    def rope(self) -> Rope:
        """The rotary embedding of a plain decoder."""
        rope = self.layers[0].rope
        if rope is None:
            raise ValueError("the first layer of this decoder has no rotary embedding")
        return rope

    def hidden_states(
        self,
        weights: Weights,
        tokens_N: torch.Tensor,
        positions_N: torch.Tensor,
        attend: Attend,
        forward: Forward = DIRECT,
    ) -> torch.Tensor:
        """The final hidden states (N, H), after the last norm, of tokens (N) at these positions (N)."""
        steps = forward.steps(tokens_N.device)
        x_N_H = F.embedding(tokens_N, _need(weights, self.embedding))
        if self.architecture.scales_embedding:
            # Transformers rounds this factor to the type of the weights.
            x_N_H = x_N_H * torch.tensor(self.hidden**0.5).to(x_N_H.dtype)
        turns = {
            rope: tuple(part.to(x_N_H.dtype) for part in rope.rotation(positions_N))
            for rope in dict.fromkeys(layer.rope for layer in self.layers)
            if rope is not None
        }
        for number, layer in enumerate(self.layers):
            turn = None if layer.rope is None else turns[layer.rope]
            x_N_H = forward.layer(self._layer, weights, number, x_N_H, turn, attend, steps)
        return self._norm(steps, weights, f"{self.architecture.prefix}norm", x_N_H)

    def _layer(
        self,
        weights: Weights,
        layer: int,
        x_N_H: torch.Tensor,
        turn: Turn | None,
        attend: Attend,
        steps: Steps,
    ) -> torch.Tensor:
        facts = self.architecture

        def norm(name: str | None, x: torch.Tensor) -> torch.Tensor:
            return x if name is None else self._norm(steps, weights, modules(name)[0], x)

        def modules(*names: str) -> list[str]:
            return [f"{facts.prefix}layers.{layer}.{name}" for name in names]

        q, k, v = self._heads(weights, modules, norm(facts.norms.attention, x_N_H), steps)
        if turn is not None:
            q, k = (steps.rotate(self._halves(x), *turn) for x in (q, k))
        (out,) = weights.project(attend(layer, q, k, v), modules(*OUT))
        x_N_H = x_N_H + norm(facts.norms.after_attention, out)
        h = norm(facts.norms.mlp, x_N_H)
        gate, up = _parts(weights.project(h, modules(*facts.gate_up)), 2)
        is_silu = facts.activation == "silu"
        inner = (steps.apply_gate if is_silu else steps.apply_gelu_gate)(gate, up)
        (down,) = weights.project(inner, modules(*DOWN))
        return x_N_H + norm(facts.norms.after_mlp, down)

    def _heads(
        self,
        weights: Weights,
        modules: Callable[..., list[str]],
        h_N_H: torch.Tensor,
        steps: Steps,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (N, A, D), keys and values (N, K, D), before the rotary embedding."""
        outputs = weights.project(h_N_H, modules(*self.architecture.qkv))
        sizes = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = outputs if len(outputs) > 1 else outputs[0].split(sizes, dim=-1)
        names = modules("self_attn.q_norm", "self_attn.k_norm")
        if self.architecture.norms_all_heads:
            q, k = (self._norm(steps, weights, n, x) for n, x in zip(names, (q, k), strict=True))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if not self.architecture.norms_all_heads:
            q, k = (self._norm(steps, weights, n, x) for n, x in zip(names, (q, k), strict=True))
        return q if self.query_scale is None else q * self.query_scale, k, v

    def _halves(self, x_N_A_D: torch.Tensor) -> torch.Tensor:
        """The heads in an order in which the two numbers of each pair that is turned are D / 2 apart, as
        `rotate` needs it. Queries and keys have the same order, so their products do not change."""
        if self.architecture.rotates_neighbours:
            return x_N_A_D.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        if self.rotary_dim == self.head_dim:
            return x_N_A_D
        sizes = [self.rotary_dim, self.head_dim - self.rotary_dim]
        turned, rest = (x.unflatten(-1, (2, -1)) for x in x_N_A_D.split(sizes, dim=-1))
        return torch.cat((turned, rest), dim=-1).flatten(-2)

    def logits(self, weights: Weights, hidden_M_H: torch.Tensor) -> torch.Tensor:
        """The logits (M, vocabulary) of hidden states (M, H)."""
        return logits_of(hidden_M_H, self.head(weights))

    def head(self, weights: Weights) -> torch.Tensor:
        """The weight (vocabulary, H) of the output head. It is the embedding if the two are tied."""
        head = weights.tensor("lm_head.weight")
        return head if head is not None else _need(weights, self.embedding)

    def _norm(self, steps: Steps, weights: Weights, module: str, x: torch.Tensor) -> torch.Tensor:
        """x after the norm of this module; x itself if the model has no such norm."""
        scale = weights.tensor(f"{module}.weight")
        if scale is None:
            return x
        if not self.architecture.norm_adds_one:
            return steps.norm(x, scale, self.eps)
        wide = scale.to(torch.promote_types(scale.dtype, torch.float32))
        return steps.norm(x, 1 + wide, self.eps).to(x.dtype)


def _need(weights: Weights, name: str) -> torch.Tensor:
    tensor = weights.tensor(name)
    if tensor is None:
        raise KeyError(name)
    return tensor


def _parts(outputs: tuple[torch.Tensor, ...], num: int) -> tuple[torch.Tensor, ...]:
    """The outputs of `num` modules, or as many equal parts of the output of one."""
    return outputs if len(outputs) == num else outputs[0].chunk(num, dim=-1)


def causal_attend(
    mask_T_T: torch.Tensor, *, kv_heads: int, windows: Sequence[int | None] = ()
) -> Attend:
    """Attention within one flat sequence. The mask (T, T) is True where a query (row) sees a key. Layers
    with a window see as many of these as it has."""

    def attend(
        layer: int, q_T_A_D: torch.Tensor, k_T_K_D: torch.Tensor, v_T_K_D: torch.Tensor
    ) -> torch.Tensor:
        length, heads, size = q_T_A_D.shape
        q = q_T_A_D.reshape(length, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)
        k, v = k_T_K_D.permute(1, 0, 2)[:, None], v_T_K_D.permute(1, 0, 2)[:, None]
        scores = (q @ k.transpose(-1, -2)) * size**-0.5
        window = windows[layer] if windows else None
        seen_T_T = mask_T_T if window is None else mask_T_T.triu(1 - window)
        scores = scores.masked_fill(~seen_T_T, float("-inf"))
        out = scores.softmax(dim=-1) @ v
        return out.permute(2, 0, 1, 3).reshape(length, heads * size)

    return attend


def decoder_of(base: Base) -> Decoder | None:
    """The lean decoder of a base model. None when the model is of another family, or when the decoder's
    logits do not agree with those of Transformers."""
    whole = base.model.config
    if forward_pass(whole.to_dict()) != LEAN:
        return None
    rotary = getattr(base.model.get_decoder(), "rotary_emb", None)
    if rotary is None:
        return None
    architecture, config = ARCHITECTURES[whole.model_type], whole.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = _ropes(config, rotary, architecture)
    rotary_dim = 2 * len(next(iter(ropes.values())).inverse_frequencies)
    key = architecture.attention_scale_key
    decoder = Decoder(
        architecture=architecture,
        layers=_layer_kinds(config, architecture, _fill(ropes, head_dim=head_dim)),
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        rotary_dim=rotary_dim,
        query_scale=None if key is None else (head_dim / getattr(config, key)) ** 0.5,
        since_rules=lean_since(whole.to_dict()),
    )
    return decoder if matches_transformers(base, decoder) else None


def _ropes(
    config: PreTrainedConfig, rotary: torch.nn.Module, architecture: Architecture
) -> dict[str | None, Rope]:
    """The rotary embedding of each type of layer; None is the type of all."""
    types = dict.fromkeys(config.layer_types) if architecture.has_rope_of_type else (None,)
    found: dict[str | None, Rope] = {}
    for kind in types:
        before = "" if kind is None else f"{kind}_"
        frequencies = getattr(rotary, f"{before}inv_freq").clone()
        found[kind] = Rope(frequencies, float(getattr(rotary, f"{before}attention_scaling")))
    return found


def _fill(ropes: dict[str | None, Rope], *, head_dim: int) -> dict[str | None, Rope]:
    """The same with a frequency of 0 for each pair that is not turned."""
    half = head_dim // 2
    return {
        kind: replace(
            rope,
            inverse_frequencies=F.pad(
                rope.inverse_frequencies, (0, half - len(rope.inverse_frequencies))
            ),
        )
        for kind, rope in ropes.items()
    }


def _layer_kinds(
    config: PreTrainedConfig, architecture: Architecture, ropes: dict[str | None, Rope]
) -> tuple[LayerKind, ...]:
    kinds = []
    for layer in range(config.num_hidden_layers):
        kind = config.layer_types[layer] if architecture.windows == "by_type" else None
        rope = ropes[kind if architecture.has_rope_of_type else None]
        has_rope = not architecture.skips_rope or bool(config.no_rope_layers[layer])
        has_window = architecture.windows == "all" or kind == "sliding_attention"
        kinds.append(
            LayerKind(rope if has_rope else None, config.sliding_window if has_window else None)
        )
    return tuple(kinds)


@torch.no_grad()
def matches_transformers(base: Base, decoder: Decoder) -> bool:
    """Whether the decoder's logits equal Transformers' on a probe, up to rounding. In half precision
    the tolerance is coarse, but it is enough to detect a wrong architecture."""
    device = base.model.device
    tokens_T = torch.arange(8, device=device) % base.model.config.get_text_config().vocab_size
    expected = base.model(tokens_T[None]).logits[0].float()
    weights = trainable_view(base.tensors, {}, scaling=Scaling(1.0))
    causal = torch.ones(8, 8, dtype=torch.bool, device=device).tril()
    attend = causal_attend(causal, kv_heads=decoder.kv_heads, windows=decoder.windows)
    positions_T = torch.arange(8, device=device)
    hidden = decoder.hidden_states(weights, tokens_T, positions_T, attend)
    actual = decoder.logits(weights, hidden).float()
    allowed = 1e-3 if base.model.dtype in WIDE else 5e-2
    return bool((actual - expected).abs().max() <= allowed * (1 + expected.abs().max()))
