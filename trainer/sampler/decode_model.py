"""A policy version as the sampler runs it.

`FusedModel` is a copy of the linear layers made for decoding, where a step is many small operations and
each costs more to start than to compute. It is made once per version, for C
(`trainer/native/packed_weights.py`) or for torch (`trainer/forward/fused_weights.py`).

`UnfusedModel` reads base and adapter as they are, for models too large to copy. Both agree with the
learner's pass to about 1e-6 in fp32. A version is one or the other for as long as it is served: the
keys in a cache are in the order of the model that wrote them.

Legend: N tokens, H hidden, A query heads, K key heads, D head size, O outputs.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F

from schemas.sampling import SamplingParams
from trainer.forward.decoder import Attend, Decoder
from trainer.forward.fused_weights import EXACT, LayerWeights, fuse_layer, pad, rotations, unit
from trainer.forward.ops import SAMPLING
from trainer.forward.weights import Trainable
from trainer.native.interface import (
    NativeDecoder,
    PackedBases,
    is_narrow,
    native_decoder,
    product,
)

COPY_BYTES = 2 << 30
"""The size in bytes of the largest base that is copied."""
PACKED_BYTES = 1 << 30
"""The size of the largest base that is packed for C, which is one more copy."""


class DecodeModel(Protocol):
    """A model that decodes: token ids and positions -> final hidden states -> logits."""

    @property
    def decoder(self) -> Decoder: ...
    @property
    def embedding(self) -> torch.Tensor: ...
    @property
    def is_narrow(self) -> bool: ...
    @property
    def native_decoder(self) -> NativeDecoder | None: ...
    def prepare(self) -> None:
        """Compute now what torch would otherwise compute for the first row."""
        ...

    def hidden_states(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend
    ) -> torch.Tensor: ...
    def logits(self, hidden_M_H: torch.Tensor) -> torch.Tensor: ...


def decode_model_of(
    decoder: Decoder,
    view: Trainable,
    *,
    num_bytes: int,
    copies: bool = True,
    bases: PackedBases | None = None,
) -> DecodeModel:
    """The version `view` over a base of this size. `copies`: whether it may be copied for decoding.
    `bases`: the packed bases of other versions."""
    apart = UnfusedModel(decoder, view.round_weights())
    is_small = num_bytes <= COPY_BYTES and apart.embedding.dtype in EXACT
    if not (copies and is_small and decoder.is_plain):
        return apart
    is_packed = num_bytes <= PACKED_BYTES
    return FusedModel(decoder, apart.view, bases or PackedBases(), takes_wide=is_packed)


def native_for(model: DecodeModel, params: SamplingParams) -> NativeDecoder | None:
    """The version in C, if such rows run in C: not those of a deterministic run, and those of a model
    that is not narrow only where they allow it."""
    if params.deterministic or not (model.is_narrow or params.allows_wide_native):
        return None
    return model.native_decoder


@dataclass(frozen=True, slots=True, eq=False)
class UnfusedModel:
    """Base and adapter as they are."""

    decoder: Decoder
    view: Trainable
    native_decoder: None = None

    def prepare(self) -> None:
        """Nothing needs to be made."""

    @property
    def embedding(self) -> torch.Tensor:
        return self.view.base[self.decoder.embedding]

    @property
    def is_narrow(self) -> bool:
        return is_narrow(self.embedding.shape[1])

    def hidden_states(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        return self.decoder.hidden_states(self.view, tokens_N, positions_N, attend, SAMPLING)

    def logits(self, hidden_M_H: torch.Tensor) -> torch.Tensor:
        return self.decoder.logits(self.view, hidden_M_H)


@dataclass(frozen=True, eq=False)
class FusedModel:
    """A copy of the linear layers with adapters added and norms folded in. It is made when torch first
    reads it."""

    decoder: Decoder
    view: Trainable
    bases: PackedBases | None
    """The packed bases of other versions, for C. None: this version does not run in C."""
    takes_wide: bool = False
    """Whether the version may run in C though it is not narrow."""

    @property
    def embedding(self) -> torch.Tensor:
        return self.view.base["model.embed_tokens.weight"]

    @cached_property
    def native_decoder(self) -> NativeDecoder | None:
        """The version for `decode.c`; None where prompts and steps run through torch."""
        if self.bases is None:
            return None
        return native_decoder(self.decoder, self.view, self.bases, takes_wide=self.takes_wide)

    def prepare(self) -> None:
        _ = self.layers

    @cached_property
    def layers(self) -> tuple[LayerWeights, ...]:
        with torch.no_grad():
            numbers = range(self.decoder.num_layers)
            return tuple(fuse_layer(self.decoder, self.view, number) for number in numbers)

    @cached_property
    def norm(self) -> torch.Tensor:
        """The weight of the last norm, times sqrt(H)."""
        return self.view.base["model.norm.weight"] * math.sqrt(self.embedding.shape[1])

    @property
    def head(self) -> torch.Tensor:
        """(H, vocabulary)"""
        return self.view.base.get("lm_head.weight", self.embedding).t()

    @property
    def is_narrow(self) -> bool:
        return is_narrow(self.embedding.shape[1])

    def hidden_states(
        self,
        tokens_N: torch.Tensor,
        positions_N: torch.Tensor,
        attend: Attend,
        *,
        rows: int | None = None,
    ) -> torch.Tensor:
        """`rows`: the bits are those of a pass with that many tokens. N must be a multiple of 8."""
        decoder = self.decoder
        heads = decoder.heads + decoder.kv_heads
        x_N_H = F.embedding(tokens_N, self.embedding)
        turn = rotations(decoder, positions_N, dtype=x_N_H.dtype)
        wide, narrow = (
            pad(x_N_H, size, decoder.eps) for size in (x_N_H.shape[1], decoder.head_dim)
        )
        for number, layer in enumerate(self.layers):
            qkv = product(unit(x_N_H, wide), layer.qkv, layer.qkv_bias, rows=rows)
            qkv = qkv.view(len(qkv), -1, decoder.head_dim)
            qk, v = qkv[:, :heads], qkv[:, heads:]
            if layer.qk_norm is not None:
                qk = unit(qk, narrow).mul_(layer.qk_norm)
            pairs = torch.view_as_complex(qk.unflatten(-1, (-1, 2)))
            qk = torch.view_as_real(pairs * turn).flatten(-2)
            attended = attend(number, qk[:, : decoder.heads], qk[:, decoder.heads :], v)
            x_N_H = _add_projection(x_N_H, attended, layer.out, layer.out_bias, rows=rows)
            gate_up = product(unit(x_N_H, wide), layer.gate_up, layer.gate_up_bias, rows=rows)
            gate, up = gate_up.chunk(2, dim=-1)
            inner = F.silu(gate).mul_(up)
            x_N_H = _add_projection(x_N_H, inner, layer.down, layer.down_bias, rows=rows)
        return unit(x_N_H, wide).mul_(self.norm)

    def logits(self, hidden_M_H: torch.Tensor) -> torch.Tensor:
        return product(hidden_M_H, self.head)


def _add_projection(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    rows: int | None,
) -> torch.Tensor:
    """The residual x plus a projection of y."""
    x = product(y, weight, x, rows=rows)
    return x if bias is None else x.add_(bias)
