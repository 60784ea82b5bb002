"""Decoding narrow models in one call a step (`trainer/native/decode.c`), where there is a C compiler.

Rows do not meet, so they are split over the device's threads, and the number of threads changes no
bit. Without a compiler, or for a model it does not fit, the sampler decodes through torch
(`trainer/sampler/model.py`), with other roundings.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
import torch.nn.functional as F

from trainer.decoder import Decoder
from trainer.fused import Layer
from trainer.native.library import library

WIDE, LANES, ROWS = 16, 32, 8
"""Floats of a vector, outputs of a panel, and rows that are computed together, as in `vectors.h`."""

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
SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocabulary", "capacity")


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in LAYER]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in SIZES),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("embedding", "norm", "head", "layer")),
    ]


class Native:
    """A fused version as `decode.c` takes it: weights in panels."""

    def __init__(
        self,
        step: ctypes.CDLL,
        decoder: Decoder,
        layers: Sequence[Layer],
        embedding: torch.Tensor,
        norm: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        self._step, self._decoder = step, decoder
        self._held: list[torch.Tensor] = []
        self._hidden, self._inner = len(norm), layers[0].down.shape[0]
        self._vocabulary = head.shape[1]
        self._scratch = norm.new_empty(0)
        table = (_Layer * len(layers))(*(self._layer(layer) for layer in layers))
        self._model = _Model(
            layers=len(layers),
            hidden=self._hidden,
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            inner=self._inner,
            vocabulary=self._vocabulary,
            eps=decoder.eps,
            embedding=self._hold(embedding),
            norm=self._hold(norm),
            head=self._hold(panels(head)),
            layer=ctypes.cast(table, ctypes.c_void_p),
        )
        self._table = table

    def logits(
        self,
        tokens_R: torch.Tensor,
        positions_R: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Read one token per row, and write its keys and values into the caches (layers, rows, K, C,
        D), of which these are the first rows; the logits (R, vocabulary) after it."""
        decoder, num = self._decoder, len(tokens_R)
        angles = positions_R[:, None].float() * decoder.inverse_frequencies
        cos, sin = angles.cos() * decoder.rope_scale, angles.sin() * decoder.rope_scale
        logits_R_V = keys.new_empty(num, self._vocabulary)
        self._model.capacity = keys.shape[3]
        heads = 2 * (decoder.heads + decoder.kv_heads)
        floats = 2 * self._hidden + heads * decoder.head_dim + 3 * self._inner
        slack = keys.shape[3] + WIDE
        parts = _split(num, torch.get_num_threads())
        if len(self._scratch) < num * floats + len(parts) * slack:
            self._scratch = keys.new_empty(num * floats + len(parts) * slack)

        def run(part: int) -> None:
            start, end = parts[part]
            own = (tokens_R, positions_R, cos, sin)
            self._step.decode(
                ctypes.byref(self._model),
                ctypes.c_int64(keys.shape[1]),
                ctypes.c_int64(start),
                ctypes.c_int64(end - start),
                *(_pointer(tensor[start:]) for tensor in own),
                _pointer(keys),
                _pointer(values),
                _pointer(self._scratch[start * floats + part * slack :]),
                _pointer(logits_R_V[start:]),
            )

        others = [_helpers(len(parts)).submit(run, part) for part in range(1, len(parts))]
        run(0)
        for other in others:
            other.result()
        return logits_R_V

    def _layer(self, layer: Layer) -> _Layer:
        found = {}
        for name in LAYER:
            tensor = getattr(layer, name)
            is_matrix = name in ("qkv", "out", "gate_up", "down")
            found[name] = self._hold(panels(tensor) if is_matrix else tensor)
        return _Layer(**found)

    def _hold(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._held.append(tensor.contiguous())
        return self._held[-1].data_ptr()


def native_of(
    decoder: Decoder,
    layers: Sequence[Layer],
    *,
    embedding: torch.Tensor,
    norm: torch.Tensor,
    head: torch.Tensor,
) -> Native | None:
    """A fused version for `decode.c`, where it fits and there is a compiler."""
    sizes = (len(norm), decoder.head_dim, layers[0].down.shape[0])
    fits = (
        embedding.device.type == "cpu"
        and embedding.dtype == torch.float32
        and all(size % WIDE == 0 for size in sizes)
    )
    step = library("decode") if fits else None
    return None if step is None else Native(step, decoder, layers, embedding, norm, head)


def panels(weight_I_O: torch.Tensor) -> torch.Tensor:
    """(inputs, outputs) -> (panels, inputs, LANES): what one vector product reads lies together."""
    num_inputs, num_outputs = weight_I_O.shape
    padded = F.pad(weight_I_O, (0, -num_outputs % LANES))
    return padded.view(num_inputs, -1, LANES).transpose(0, 1).contiguous()


def _split(num_rows: int, threads: int) -> list[tuple[int, int]]:
    """Stretches of rows, one per thread, as many as are computed together or a multiple."""
    blocks = -(-num_rows // ROWS)
    size = -(-blocks // max(1, min(threads, blocks))) * ROWS
    return [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


@cache
def _helpers(parts: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(parts - 1, thread_name_prefix="decode")


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
