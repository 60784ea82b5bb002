"""How the learner runs a forward pass: what is kept for the backward pass, and what is fused.

Neither choice changes which function is computed. `recompute` keeps only the input of each layer and
computes the layer again for its gradient. That takes a third more arithmetic and a small part of the
memory, and gives the same bits, because the same operations run on the same numbers. `fuse` compiles the
steps between the matrix products, in which a GPU otherwise mostly reads and writes memory.
`fuses_attention` compiles attention (`trainer/forward/compiled_attention.py`). Both round differently,
and have no effect on a CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from trainer.forward.logprobs import CHUNK_ELEMENTS, CUDA_CHUNK_ELEMENTS, KEPT_ELEMENTS
from trainer.forward.rms_norm import rms_norm


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding. `sin` includes the sign of the swap of halves."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def apply_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) up."""
    return F.silu(gate) * up


def apply_gelu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) up, with the approximation by tanh."""
    return F.gelu(gate, approximate="tanh") * up


@dataclass(frozen=True, slots=True)
class Steps:
    """The functions that compute the operations between the matrix products."""

    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = rms_norm
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = rotate
    apply_gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = apply_gate
    apply_gelu_gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = apply_gelu_gate


def one_kernel_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` by PyTorch, which runs it as one kernel on a GPU if both types are the same."""
    if weight.dtype != x.dtype:
        return rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


PLAIN = Steps()
INFERENCE = Steps(norm=one_kernel_rms_norm)


def elementary_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` in elementary operations, which a compiler fuses, including the backward pass."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * inverse * weight).to(x.dtype)


@cache
def compiled_steps(backend: str = "inductor") -> Steps:
    """The operations, compiled with `torch.compile`: once per process, for any number of tokens."""
    parts = (elementary_rms_norm, rotate, apply_gate, apply_gelu_gate)
    return Steps(*(torch.compile(part, dynamic=True, backend=backend) for part in parts))


@dataclass(frozen=True, slots=True)
class Forward:
    """How the passes of one policy run."""

    recompute: bool = False
    fuse: bool = False
    allows_native: bool = True
    """Whether models may run their passes in C."""
    allows_wide_native: bool = True
    """Whether models that are not narrow may too. Under rules 5 they ran through torch."""
    trains_padding: bool = True
    """Whether the embedding of the padding token is trained like any other. Under rules 1 it was not,
    for models that run through Transformers."""
    has_large_chunks: bool = True
    """Whether a CUDA GPU computes many logits at a time. Under rules 3 it computed as few as a CPU."""
    shares_prefixes: bool = True
    """Whether rows share all that they begin with. Under rules 5 they shared equal contexts only."""
    fuses_attention: bool = False
    """Whether attention is compiled on a CUDA GPU too. Under rules 4 it was not."""
    chunks_general_logits: bool = True
    """Whether models that run through Transformers compute few logits at a time, too. Under rules 5 they
    computed those of all tokens at once."""
    is_inference: bool = False
    """Whether nothing needs a gradient. Norms then take fewer kernels on a CUDA GPU."""

    def steps(self, device: torch.device) -> Steps:
        """The operations between the matrix products on this device."""
        if device.type != "cuda":
            return PLAIN
        if self.fuse:
            return compiled_steps()
        return INFERENCE if self.is_inference else PLAIN

    def chunk_elements(self, device: torch.device) -> int:
        """How many logits are computed at a time on this device."""
        is_large = self.has_large_chunks and device.type == "cuda"
        return CUDA_CHUNK_ELEMENTS if is_large else CHUNK_ELEMENTS

    def kept_elements(self, device: torch.device) -> int:
        """How many logits a pass keeps for its gradient on this device. A GPU computes them again in
        little time, and `recompute` asks to save memory."""
        return 0 if self.recompute or device.type == "cuda" else KEPT_ELEMENTS

    def layer(self, run: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
        """Run one layer and return its output. With `recompute` only its inputs are kept."""
        if not (self.recompute and torch.is_grad_enabled()):
            return run(*args)
        # Nothing here draws random numbers, so there is no random state to restore.
        result: torch.Tensor = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
        return result


DIRECT = Forward()
SAMPLING = Forward(is_inference=True)
