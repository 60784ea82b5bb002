"""A version's weights as `trainer/native/decode.c` reads them.

Matrices are in panels, so that the numbers which one vector product reads are next to each other. A new
version of an adapter is the packed base, made once, plus the adapter's change
(`trainer/native/adapt.c`). Everything else, including a DoRA and fully trained weights, is packed again.

Legend: L layers, I inputs, O outputs, r rank.
"""

import ctypes
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from trainer.forward.decoder import Decoder
from trainer.forward.fused_weights import fuse_layer, interleaved_order, norm_fold
from trainer.forward.weights import FUSED, Trainable, layer_module
from trainer.lru_cache import LruCache
from trainer.native.compile import load_library, vector_bytes
from trainer.native.threads import run_on_threads

WIDE = vector_bytes() // 4
LANES = 2 * WIDE
"""Floats of a vector, and outputs of a panel, as in `vectors.h`."""
HIGH_RANK = 64
"""Adapters of a higher rank are multiplied by torch: `adapt.c` saves copies of the weights, and such
products take longer than those copies. This depends only on the adapter, because the two ways round
differently."""
LAYER = (
    "qkv",
    "qkv_bias",
    "qk_norm",
    "out",
    "out_bias",
    "gate_up",
    "gate_up_bias",
    "down",
    "down_bias",
)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedWeights:
    """Matrices in panels, (outputs / LANES, inputs, LANES). The gate's and the other outputs alternate,
    a vector each. `layers` have the tensors that LAYER names; biases and the norm only where the model
    has them."""

    layers: tuple[Mapping[str, torch.Tensor], ...]
    embedding: torch.Tensor
    norm: torch.Tensor
    """The weight of the last norm, times sqrt(H)."""
    head: torch.Tensor


class _Adapted(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("base", "a", "b", "out")),
        *((name, ctypes.c_int64) for name in ("panels", "inputs", "rank")),
    ]


class PackedBases:
    """The bases of adapters, packed once, and memory for versions. Memory that was mapped for a version
    that is gone costs half as much to write as new memory."""

    def __init__(self) -> None:
        self._held: LruCache[tuple[Decoder, PackedWeights]] = LruCache(2)
        self._rooms: list[torch.Tensor] = []

    def pack(self, decoder: Decoder, view: Trainable) -> PackedWeights:
        """The version `view`. Keep the result and not its tensors, which are overwritten after it is
        gone."""
        if not view.has_frozen_base or view.factors or _rank(view) > HIGH_RANK:
            return pack(decoder, view)
        key = str(id(decoder))
        held = self._held.get(key)
        if held is None:
            held = self._held.put(key, (decoder, pack(decoder, replace(view, pairs={}))))
        _, base = held
        adapt = load_library("adapt")
        if not view.pairs:
            return base
        return (
            pack(decoder, view) if adapt is None else self._add_adapters(adapt, base, decoder, view)
        )

    def _add_adapters(
        self, adapt: ctypes.CDLL, base: PackedWeights, decoder: Decoder, view: Trainable
    ) -> PackedWeights:
        added = {
            what: part
            for what in FUSED
            if (part := _adapter_products(decoder, view, what)) is not None
        }
        places = [(number, what) for number in range(len(base.layers)) for what in added]
        sizes = [base.layers[number][what].numel() for number, what in places]
        room = self._room(sum(sizes))
        layers = [dict(layer) for layer in base.layers]
        table = (_Adapted * len(places))()
        for at, part, (number, what) in zip(table, room.split(sizes), places, strict=True):
            before = base.layers[number][what]
            layers[number][what] = out = part.view_as(before)
            a, b = (tensor[number] for tensor in added[what])
            at.base, at.a, at.b, at.out = (tensor.data_ptr() for tensor in (before, a, b, out))
            at.panels, at.inputs, at.rank = (*before.shape[:2], a.shape[1])
        following = ctypes.c_int64(0)

        def run(_: int) -> None:
            adapt.adapt(table, ctypes.c_int64(len(table)), ctypes.byref(following))

        run_on_threads(run, torch.get_num_threads())
        made = replace(base, layers=tuple(layers))
        weakref.finalize(made, self._rooms.append, room)
        return made

    def _room(self, num_floats: int) -> torch.Tensor:
        """Free memory of this size, or new memory. Memory of another size is released."""
        while self._rooms:
            room = self._rooms.pop()
            if len(room) == num_floats:
                return room
        return torch.empty(num_floats)


def pack(decoder: Decoder, view: Trainable) -> PackedWeights:
    """The version `view`, packed from its weights."""
    embedding = view.base["model.embed_tokens.weight"]
    return PackedWeights(
        layers=tuple(_layer(decoder, view, layer) for layer in range(decoder.num_layers)),
        embedding=embedding.contiguous(),
        norm=view.base["model.norm.weight"] * math.sqrt(embedding.shape[1]),
        head=panels(view.base.get("lm_head.weight", embedding).t()),
    )


def _rank(view: Trainable) -> int:
    """The highest rank of its adapters."""
    return max((len(a_r_I) for a_r_I, _ in view.pairs.values()), default=0)


def _adapter_products(
    decoder: Decoder, view: Trainable, what: str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The change that the adapters of these modules make in each of the L layers, as one product: (L, I,
    r), and (L, O, r) in panels, where r is the sum of their ranks. None where there are no adapters. A
    layer without one gets zeros."""
    layers = range(decoder.num_layers)
    parts_a: list[torch.Tensor] = []
    parts_b: list[torch.Tensor] = []
    for module in FUSED[what]:
        pairs = [view.pairs.get(layer_module(number, module)) for number in layers]
        known = next((pair for pair in pairs if pair is not None), None)
        size = len(view.base[f"{layer_module(0, module)}.weight"])
        if known is None:
            parts_b.append(view.base["model.norm.weight"].new_zeros(len(layers), size, 0))
            continue
        none = tuple(torch.zeros_like(part) for part in known)
        a, b = (torch.stack(parts) for parts in zip(*(p or none for p in pairs), strict=True))
        parts_a.append(a)
        parts_b.append(b)
    if not parts_a:
        return None
    a_L_r_I = torch.cat(parts_a, dim=1)
    folds = [norm_fold(view, number, what) for number in layers]
    known_folds = [fold[None] for fold in folds if fold is not None]
    if known_folds:
        a_L_r_I = a_L_r_I * torch.stack(known_folds)
    b_L_r_O = a_L_r_I.new_zeros(len(layers), a_L_r_I.shape[1], sum(b.shape[1] for b in parts_b))
    rank = output = 0
    for b_L_O_r in parts_b:
        _, outputs, own = b_L_O_r.shape
        place = b_L_r_O[:, rank : rank + own, output : output + outputs]
        torch.mul(b_L_O_r.transpose(1, 2), view.scale, out=place)
        rank, output = rank + own, output + outputs
    if what == "qkv":
        b_L_r_O = b_L_r_O[..., interleaved_order(decoder, device=b_L_r_O.device)]
    if what == "gate_up":
        b_L_r_O = in_turns(b_L_r_O)
    return a_L_r_I.transpose(1, 2).contiguous(), panels(b_L_r_O)


def _layer(decoder: Decoder, view: Trainable, number: int) -> dict[str, torch.Tensor]:
    layer = fuse_layer(decoder, view, number)
    found: dict[str, torch.Tensor] = {}
    for name in LAYER:
        tensor = getattr(layer, name)
        if tensor is not None and name in ("gate_up", "gate_up_bias"):
            tensor = in_turns(tensor)
        if tensor is not None:
            found[name] = panels(tensor) if name in FUSED else tensor.contiguous()
    return found


def panels(weight_I_O: torch.Tensor) -> torch.Tensor:
    """(..., I, O) -> (..., O / LANES, I, LANES), zeros after the last output."""
    padded = F.pad(weight_I_O, (0, -weight_I_O.shape[-1] % LANES))
    return padded.unflatten(-1, (-1, LANES)).transpose(-2, -3).contiguous()


def in_turns(gate_up: torch.Tensor) -> torch.Tensor:
    """The gate's and the other outputs, (..., 2 I), alternating a vector each."""
    return gate_up.unflatten(-1, (2, -1, WIDE)).transpose(-3, -2).flatten(-3)
