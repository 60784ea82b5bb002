"""A lean forward pass for decoders of the Llama family (Llama, Mistral, Qwen2, Qwen3).

On small models Transformers' modules cost more than their arithmetic. This is the same arithmetic in
plain functions over named tensors. Learner and sampler both use it, so they cannot differ. Tokens are
flat: no padding reaches a matrix product. Attention is a callback, because that is the only difference
between learner, prompt and decoding step. A model runs this way only after `matches_transformers` has
compared it with Transformers. Other models take `trainer/forward/transformers_pass.py`.

Legend: N tokens (flat), H hidden, A query heads, K key heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from schemas.models.families import LEAN, forward_pass
from trainer.forward.lm_head import WIDE, logits_of
from trainer.forward.ops import DIRECT, Forward, Steps
from trainer.forward.weights import trainable_view
from trainer.model.base import Base
from trainer.model.lora_names import Scaling


class Weights(Protocol):
    """The weights that a forward pass reads."""

    def tensor(self, name: str) -> torch.Tensor | None: ...
    def project(self, x_N_H: torch.Tensor, layer: int, what: str) -> tuple[torch.Tensor, ...]: ...


Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q_N_A_D, k_N_K_D, v_N_K_D) -> attended_N_AD. The caller decides which tokens see which."""


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """The shape of a model, with functions that compute its passes. The weights are passed to each
    call."""

    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    inverse_frequencies: torch.Tensor
    rope_scale: float

    @property
    def groups(self) -> int:
        """The number of query heads per key head."""
        return self.heads // self.kv_heads

    def rotation(self, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the rotary embedding, (N, 1, D) each. The embedding swaps the halves of a head:
        (x1, x2) -> (-x2, x1). sin includes the sign, so that the swap is a plain roll."""
        half = positions_N[:, None].float() * self.inverse_frequencies
        angles = torch.cat((half, half), dim=-1)[:, None, :]
        sin = angles.sin() * self.rope_scale
        sin[..., : self.head_dim // 2].neg_()
        return angles.cos() * self.rope_scale, sin

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
        x_N_H = F.embedding(tokens_N, _need(weights, "model.embed_tokens.weight"))
        cos, sin = (part.to(x_N_H.dtype) for part in self.rotation(positions_N))
        for layer in range(self.num_layers):
            x_N_H = forward.layer(self._layer, weights, layer, x_N_H, cos, sin, attend, steps)
        return self._norm(steps, weights, "model.norm.weight", x_N_H)

    def _layer(
        self,
        weights: Weights,
        layer: int,
        x_N_H: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        steps: Steps,
    ) -> torch.Tensor:
        name = f"model.layers.{layer}."
        h = self._norm(steps, weights, name + "input_layernorm.weight", x_N_H)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in weights.project(h, layer, "qkv"))
        q = self._norm(steps, weights, name + "self_attn.q_norm.weight", q)
        k = self._norm(steps, weights, name + "self_attn.k_norm.weight", k)
        attended = attend(layer, steps.rotate(q, cos, sin), steps.rotate(k, cos, sin), v)
        (out,) = weights.project(attended, layer, "out")
        x_N_H = x_N_H + out
        h = self._norm(steps, weights, name + "post_attention_layernorm.weight", x_N_H)
        gate, up = weights.project(h, layer, "gate_up")
        (down,) = weights.project(steps.apply_gate(gate, up), layer, "down")
        return x_N_H + down

    def logits(self, weights: Weights, hidden_M_H: torch.Tensor) -> torch.Tensor:
        """The logits (M, vocabulary) of hidden states (M, H)."""
        return logits_of(hidden_M_H, self.head(weights))

    def head(self, weights: Weights) -> torch.Tensor:
        """The weight (vocabulary, H) of the output head. It is the embedding if the two are tied."""
        head = weights.tensor("lm_head.weight")
        return head if head is not None else _need(weights, "model.embed_tokens.weight")

    def _norm(self, steps: Steps, weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = weights.tensor(name)
        return x if scale is None else steps.norm(x, scale, self.eps)


def _need(weights: Weights, name: str) -> torch.Tensor:
    tensor = weights.tensor(name)
    if tensor is None:
        raise KeyError(name)
    return tensor


def causal_attend(mask_T_T: torch.Tensor, *, kv_heads: int) -> Attend:
    """Attention within one flat sequence. The mask (T, T) is True where a query (row) sees a key."""

    def attend(
        layer: int, q_T_A_D: torch.Tensor, k_T_K_D: torch.Tensor, v_T_K_D: torch.Tensor
    ) -> torch.Tensor:
        length, heads, size = q_T_A_D.shape
        q = q_T_A_D.reshape(length, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)
        k, v = k_T_K_D.permute(1, 0, 2)[:, None], v_T_K_D.permute(1, 0, 2)[:, None]
        scores = (q @ k.transpose(-1, -2)) * size**-0.5
        scores = scores.masked_fill(~mask_T_T, float("-inf"))
        out = scores.softmax(dim=-1) @ v
        return out.permute(2, 0, 1, 3).reshape(length, heads * size)

    return attend


def decoder_of(base: Base) -> Decoder | None:
    """The lean decoder of a base model. None when the model is of another family, or when the decoder's
    logits do not agree with those of Transformers."""
    config = base.model.config
    rotary = getattr(getattr(base.model, "model", None), "rotary_emb", None)
    if forward_pass(config.to_dict()) != LEAN or rotary is None:
        return None
    decoder = Decoder(
        num_layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
        inverse_frequencies=rotary.inv_freq.clone(),
        rope_scale=float(rotary.attention_scaling),
    )
    return decoder if matches_transformers(base, decoder) else None


@torch.no_grad()
def matches_transformers(base: Base, decoder: Decoder) -> bool:
    """Whether the decoder's logits equal Transformers' on a probe, up to rounding. In half precision
    the tolerance is coarse, but it is enough to detect a wrong architecture."""
    device = base.model.device
    tokens_T = torch.arange(8, device=device) % base.model.config.vocab_size
    expected = base.model(tokens_T[None]).logits[0].float()
    weights = trainable_view(base.tensors, {}, scaling=Scaling(1.0))
    causal = torch.ones(8, 8, dtype=torch.bool, device=device).tril()
    attend = causal_attend(causal, kv_heads=decoder.kv_heads)
    positions_T = torch.arange(8, device=device)
    hidden = decoder.hidden_states(weights, tokens_T, positions_T, attend)
    actual = decoder.logits(weights, hidden).float()
    allowed = 1e-3 if base.model.dtype in WIDE else 5e-2
    return bool((actual - expected).abs().max() <= allowed * (1 + expected.abs().max()))
