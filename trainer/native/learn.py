"""The learner's pass over a model with adapters, in C (`trainer/native/learn.c`).

`trainer/forward/fused_pass.py` computes the same pass in hundreds of torch operations. Here it is two
calls, one forward and one backward: there is nothing to start, little passes through memory between two
operations on the same rows, and attention needs no padding. The fused weights of a layer are made when
they are used, so those of a whole model are never in memory. In float64, values and gradients equal
those of the plain pass up to rounding. The number of threads changes no bit.

Legend: N tokens, H hidden, D head size, O outputs, r rank.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from trainer.forward.decoder import Decoder
from trainer.forward.fused_weights import norm_fold, qk_norm
from trainer.forward.rms_norm import rms_norm
from trainer.forward.spans import Segment
from trainer.forward.weights import FUSED, Trainable, layer_module
from trainer.native.compile import load_library
from trainer.native.supported_models import can_learn
from trainer.native.threads import run_on_threads

PHASE_BYTES = 64
KEPT_BYTES = 1 << 30
"""The most memory that a pass leaves to the next one. Fresh pages from the kernel would take
a noticeable part of a pass."""


class _Module(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("outputs", "rank")),
        *((name, ctypes.c_void_p) for name in ("weight", "a", "b", "grad_a", "grad_b")),
    ]


class _Fused(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "count")),
        *((name, ctypes.c_void_p) for name in ("bias", "fold")),
        ("module", ctypes.POINTER(_Module)),
        *((name, ctypes.c_int64) for name in ("ranks", "width", "share")),
        *((name, ctypes.c_void_p) for name in ("panels", "low", "high")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [("fused", _Fused * len(FUSED)), ("qk_norm", ctypes.c_void_p)]


SIZES = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "inner"),
    *("tokens", "segments", "trees", "threads", "keeps"),
)
PLACES = ("shares", "grad_seen", "grad_qkv", "scratch")


class _Pass(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in SIZES),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "segment", "context", "tree")),
        ("layer", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_void_p) for name in ("x", "kept", "work", *PLACES)),
        ("share", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class LearnerPass:
    """The compiled pass over one version."""

    library: ctypes.CDLL
    decoder: Decoder
    view: Trainable

    @property
    def kernels(self) -> str:
        """The library's name, which follows from its source, the compiler and the processor."""
        return Path(self.library._name).stem

    def hidden_states(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """Token ids and their positions -> final hidden states (N, H), as `Decoder.hidden_states`. A
        segment must come after its context."""
        base = self.view.base
        x_N_H = F.embedding(tokens_N, base["model.embed_tokens.weight"])
        work = _Work(self.library, self.decoder, self.view, positions_N, segments)
        x_N_H = _Hidden.apply(x_N_H, work, *work.trained)
        return rms_norm(x_N_H, base["model.norm.weight"], self.decoder.eps)


def learner_pass(
    decoder: Decoder, view: Trainable, *, takes_wide: bool = False
) -> LearnerPass | None:
    """The learner's pass over this version; None where it runs through torch, because the model is not
    supported, or wide without `takes_wide`, or there is no compiler."""
    if not can_learn(decoder, view, takes_wide=takes_wide):
        return None
    library = load_library("learn", *(("DOUBLE",) if view.dtype == torch.float64 else ()))
    return None if library is None else LearnerPass(library, decoder, view)


class _Hidden(torch.autograd.Function):
    """Embeddings -> hidden states before the last norm."""

    @staticmethod
    def forward(
        ctx: Any, x_N_H: torch.Tensor, work: "_Work", *trained: torch.Tensor
    ) -> torch.Tensor:
        ctx.work = work
        x_N_H = x_N_H.detach().clone()
        work.forward(x_N_H)
        return x_N_H

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N_H: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.work.backward(grad_N_H)


class _Work:
    """One pass: the struct that C reads, and the memory that it works in."""

    def __init__(
        self,
        library: ctypes.CDLL,
        decoder: Decoder,
        view: Trainable,
        positions_N: torch.Tensor,
        segments: Sequence[Segment],
    ) -> None:
        self._library = library
        self._kept_alive: list[torch.Tensor] = []
        self._modules: list[tuple[_Module, torch.Tensor, torch.Tensor]] = []
        embedding = view.base["model.embed_tokens.weight"]
        angles = positions_N[:, None].float() * decoder.rope.inverse_frequencies
        table, context, trees = _segment_tables(segments)
        layers = (_Layer * decoder.num_layers)(
            *(self._layer(decoder, view, layer) for layer in range(decoder.num_layers))
        )
        self.trained = [tensor for _, *pair in self._modules for tensor in pair]
        keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.trained)
        self._pass = _Pass(
            layers=decoder.num_layers,
            hidden=embedding.shape[1],
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            inner=layers[0].fused[len(FUSED) - 1].inputs,
            tokens=len(positions_N),
            segments=len(segments),
            trees=len(trees) - 1,
            threads=torch.get_num_threads(),
            keeps=int(keeps),
            eps=decoder.eps,
            scale=view.scale,
            cos=self._hold((angles.cos() * decoder.rope.scale).to(view.dtype)),
            sin=self._hold((angles.sin() * decoder.rope.scale).to(view.dtype)),
            segment=self._hold(table),
            context=self._hold(context),
            tree=self._hold(trees),
            layer=layers,
        )
        self._pointer = ctypes.byref(self._pass)
        kept, work = ctypes.c_int64(), ctypes.c_int64()
        library.learn_sizes(self._pointer, ctypes.byref(kept), ctypes.byref(work))
        self._memory: _Memory | None = _Memory(kept.value + work.value, view.dtype)
        self._pass.kept = self._memory.tensor.data_ptr()
        self._pass.work = self._memory.tensor[kept.value :].data_ptr()
        library.learn_prepare(self._pointer)

    def forward(self, x_N_H: torch.Tensor) -> None:
        """Replace embeddings by hidden states, in place."""
        self._pass.x = x_N_H.data_ptr()
        self._run(self._library.learn_forward)
        if not self._pass.keeps:
            self._memory = None

    def backward(self, grad_N_H: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of A and B, module by module. Raises RuntimeError when called twice."""
        if self._memory is None:
            raise RuntimeError("a pass goes back once: what it kept is gone")
        grad_N_H = grad_N_H.clone(memory_format=torch.contiguous_format)
        self._pass.x = grad_N_H.data_ptr()
        grads: list[torch.Tensor] = []
        for module, a_r_H, b_O_r in self._modules:
            grads += (torch.empty_like(a_r_H), torch.empty_like(b_O_r))
            module.grad_a, module.grad_b = (grad.data_ptr() for grad in grads[-2:])
        self._run(self._library.learn_backward)
        self._memory = None
        return grads

    def _run(self, phases: Callable[[object, ctypes.c_void_p, ctypes.c_int64], object]) -> None:
        """Run all phases on this thread, and on the helpers that come in time."""
        table = torch.zeros((3 * self._pass.layers + 3) * PHASE_BYTES, dtype=torch.uint8)
        first = ctypes.c_void_p(table.data_ptr())

        def run(thread: int) -> None:
            phases(self._pointer, first, ctypes.c_int64(thread))

        run_on_threads(run, self._pass.threads)

    def _layer(self, decoder: Decoder, view: Trainable, layer: int) -> _Layer:
        fused = (self._fuse(view, layer, what) for what in FUSED)
        norms = qk_norm(decoder, view, layer)
        return _Layer(
            fused=(_Fused * len(FUSED))(*fused),
            qk_norm=None if norms is None else self._hold(norms),
        )

    def _fuse(self, view: Trainable, layer: int, what: str) -> _Fused:
        names = [layer_module(layer, module) for module in FUSED[what]]
        modules = (_Module * len(names))()
        for module, name in zip(modules, names, strict=True):
            weight_O_H = view.base[f"{name}.weight"]
            module.outputs, module.weight = len(weight_O_H), self._hold(weight_O_H)
            if name in view.pairs:
                a_r_H, b_O_r = view.pairs[name]
                module.rank = len(a_r_H)
                module.a, module.b = self._hold(a_r_H.detach()), self._hold(b_O_r.detach())
                self._modules.append((module, a_r_H, b_O_r))
        known = [b for b in (view.base.get(f"{name}.bias") for name in names) if b is not None]
        fold_H = norm_fold(view, layer, what)
        return _Fused(
            inputs=weight_O_H.shape[1],
            outputs=sum(module.outputs for module in modules),
            count=len(names),
            bias=self._hold(torch.cat(known)) if len(known) == len(names) else None,
            fold=None if fold_H is None else self._hold(fold_H),
            module=modules,
        )

    def _hold(self, tensor: torch.Tensor) -> int:
        self._kept_alive.append(tensor.contiguous())
        return self._kept_alive[-1].data_ptr()


def _segment_tables(
    segments: Sequence[Segment],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The segments with where their contexts begin in the second table, which has the tokens of all
    contexts, and the first segment of each tree, then their number. A tree ends where no later segment
    sees a token before."""
    ends = [*accumulate((s.num_context for s in segments), initial=0)]
    rows = [
        (s.start, s.end, first, s.num_context) for s, first in zip(segments, ends, strict=False)
    ]
    context = [token for s in segments for part in s.context for token in part]
    first_seen = [s.keys[0].start for s in segments]
    earliest = [*accumulate(reversed(first_seen), min)][::-1]
    trees = [n for n, s in enumerate(segments) if s.start == earliest[n]]
    tables = (rows, context, [*trees, len(segments)])
    table, seen, firsts = (torch.tensor(one, dtype=torch.int64) for one in tables)
    return table, seen, firsts


def release_memory() -> None:
    """Give back the memory that passes left behind."""
    _Memory.left.clear()


class _Memory:
    """Memory of a pass, taken from what earlier passes left behind where that is enough."""

    left: list[torch.Tensor] = []

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        while self.left:
            self.tensor = self.left.pop().view(dtype)
            if len(self.tensor) >= size:
                return
        self.tensor = torch.empty(size, dtype=dtype)

    def __del__(self) -> None:
        if not self.left and self.tensor.nbytes <= KEPT_BYTES:
            self.left.append(self.tensor.view(torch.uint8))
