"""Which models run in C. Each is a function of the model and never of a trial run: C rounds in another
way than torch, so another answer would give a run other bits."""

import torch

from trainer.forward.decoder import Decoder
from trainer.forward.weights import Trainable, layer_module
from trainer.native.compile import LARGE

MOST_HIDDEN = 512
"""A model of up to this hidden size is narrow."""


def is_narrow(hidden_size: int) -> bool:
    """Whether starting an operation of such a model costs as much as computing it."""
    return hidden_size <= MOST_HIDDEN


def can_learn(decoder: Decoder, view: Trainable, *, takes_wide: bool) -> bool:
    """Whether `learn.c` takes the learner's pass over this version: its base is frozen, of sizes that
    are whole vectors, and narrow unless `takes_wide`. All of its tensors are of one type, and its
    adapter is not a DoRA."""
    return (
        decoder.is_plain
        and (takes_wide or _has_narrow_base(decoder, view))
        and view.has_frozen_base
        and not view.factors
        and view.dtype in (torch.float32, torch.float64)
        and all(part.dtype == view.dtype for pair in view.pairs.values() for part in pair)
        and _has_sizes(decoder, view, dtype=view.dtype)
    )


def can_decode(decoder: Decoder, view: Trainable, *, takes_wide: bool) -> bool:
    """Whether `decode.c` samples from this version: one in float32, of sizes that are whole vectors. It
    is narrow, or with `takes_wide` a frozen base with adapters, because their weights are packed only
    once. An adapter is not a DoRA then."""
    dtype = view.base[decoder.embedding].dtype
    is_frozen = view.has_frozen_base and not view.factors
    is_known = _has_narrow_base(decoder, view) or (takes_wide and is_frozen)
    return (
        is_known
        and decoder.is_plain
        and dtype == torch.float32
        and _has_sizes(decoder, view, dtype=dtype)
    )


def _has_narrow_base(decoder: Decoder, view: Trainable) -> bool:
    return is_narrow(view.base[decoder.embedding].shape[1])


def _has_sizes(decoder: Decoder, view: Trainable, *, dtype: torch.dtype) -> bool:
    """Whether it lies on a CPU, and its sizes are whole vectors of this type, of LARGE bytes on every
    machine."""
    embedding = view.base[decoder.embedding]
    hidden, inner = embedding.shape[1], len(view.base[layer_module(0, "mlp.gate_proj.weight")])
    lanes = LARGE // dtype.itemsize
    return embedding.device.type == "cpu" and all(
        size % lanes == 0 for size in (hidden, decoder.head_dim, inner)
    )
