"""Narrow models read and draw in C (`trainer/native/decode.c`), where there is a C compiler.

Rows do not meet, so the work is split over the device's threads, and the number of threads changes no
bit. Without a compiler, or for a model it does not fit, the sampler works through torch
(`trainer/sampler/decode_model.py`), with other roundings.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.forward.decoder import Decoder
from trainer.forward.weights import Trainable, layer_module
from trainer.native.compile import library
from trainer.native.threads import together
from trainer.sampler.native.packed_weights import LAYER, WIDE, Bases, Packed

PHASES, PHASE = (8, 6), 8
"""Phases of a step, per layer and beside them, and the integers that each takes."""
PASS_ROWS = 512
"""Tokens of prompts that are read together: more would leave the processor's caches."""
MORE_POSITIONS = 512
MOST_THREADS = 16
"""A matrix of a narrow model has some sixteen panels: more threads would find nothing to do."""

SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocabulary")
COUNTS = ("rows", "steps", "stops", "active", "ends")
PLACES = (
    *("row", "actives", "end", "stop", "uniform", "temperature", "drawn", "logprob"),
    *("rest", "logits", "room"),
)


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in LAYER]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in SIZES),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("embedding", "norm", "head", "cos", "sin", "layer")),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in COUNTS),
        *((name, ctypes.c_void_p) for name in PLACES),
        ("room_of_thread", ctypes.c_int64),
        ("phase", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """Keys, then values, (2, layers, K, places, D) as `decode.c` lays them out: of `length` tokens."""

    data: torch.Tensor
    length: int

    @property
    def places(self) -> int:
        return self.data.shape[3]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A row: the token it reads at a position, after a prompt that others may share. `own` is where it
    writes, (2, layers, K, places, D); `left`: how many tokens it may still draw."""

    token: int
    position: int
    own: torch.Tensor
    prompt: Cache | None = None
    left: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """How tokens are drawn and read again: a uniform number per step and row, a temperature per row."""

    uniforms: Sequence[Sequence[float]]
    temperatures: Sequence[float]
    stop_ids: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Tokens and logprobs, row by row; those of a row end with the one that ended it."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


class Native:
    """A version that `decode.c` reads."""

    def __init__(self, step: ctypes.CDLL, decoder: Decoder, weights: Packed) -> None:
        self._step, self._decoder, self._weights = step, decoder, weights
        self._hidden, self._vocabulary = len(weights.norm), len(weights.embedding)
        self._inner = weights.layers[0]["down"].shape[1]
        self._rest = weights.norm.new_empty(0)
        self._turns = weights.norm.new_empty(2, 0, decoder.head_dim)
        layers = [
            _Layer(**{name: tensor.data_ptr() for name, tensor in layer.items()})
            for layer in weights.layers
        ]
        self._table = (_Layer * len(layers))(*layers)
        self._model = _Model(
            layers=len(layers),
            hidden=self._hidden,
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            inner=self._inner,
            vocabulary=self._vocabulary,
            eps=decoder.eps,
            embedding=weights.embedding.data_ptr(),
            norm=weights.norm.data_ptr(),
            head=weights.head.data_ptr(),
            layer=ctypes.cast(self._table, ctypes.c_void_p),
        )

    def cache(self, places: int, *rows: int) -> torch.Tensor:
        """Room for the keys and values of so many places, (*rows, 2, layers, K, places, D); whole
        vectors of them."""
        decoder = self._decoder
        places = -(-places // WIDE) * WIDE
        shape = (2, decoder.num_layers, decoder.kv_heads, places, decoder.head_dim)
        return torch.empty((*rows, *shape))

    def read(self, prompts: Sequence[Sequence[int]]) -> list[tuple[Cache, torch.Tensor]]:
        """The cache of each prompt, and the logits (V) after its last token. The prompts' tokens stand
        in a row, and are read so many at a time wherever one ends: no bit depends on it."""
        caches = [Cache(self.cache(len(ids)), len(ids)) for ids in prompts]
        rows = [
            Reading(token, position, cache.data)
            for ids, cache in zip(prompts, caches, strict=True)
            for position, token in enumerate(ids)
        ]
        last = np.cumsum([len(ids) for ids in prompts]) - 1
        found = []
        for start in range(0, len(rows), PASS_ROWS):
            part = rows[start : start + PASS_ROWS]
            ends = [int(end) - start for end in last if start <= end < start + len(part)]
            found += list(self.logits(part, ends=ends))
        return list(zip(caches, found, strict=True))

    def logits(self, rows: Sequence[Reading], *, ends: Sequence[int] | None = None) -> torch.Tensor:
        """Read one token per row; the logits after those of `ends` (all rows), (ends, V)."""
        logits, _ = self._run(rows, range(len(rows)) if ends is None else ends, None)
        return logits

    def draw(self, rows: Sequence[Reading], drawing: Drawing) -> Drawn:
        """Read one token per row and draw the next, and so on for as many steps as there are uniform
        numbers; a row stops where it draws a stop id, what is not finite, or the last it has left."""
        _, drawn = self._run(rows, range(len(rows)), drawing)
        return drawn

    def _run(
        self, rows: Sequence[Reading], ends: Sequence[int], drawing: Drawing | None
    ) -> tuple[torch.Tensor, Drawn]:
        num, steps = len(rows), len(drawing.uniforms) if drawing else 1
        self._turn(max(row.position for row in rows) + steps)
        table = np.array([_record(row) for row in rows], dtype=np.int64)
        actives, end = np.arange(num), np.array(ends, dtype=np.int64)
        stop = np.array(drawing.stop_ids if drawing else (), dtype=np.int64)
        uniform = np.array(drawing.uniforms if drawing else ())
        temperature = np.array(drawing.temperatures if drawing else ())
        tokens, logprobs = np.full((steps, num), -1), np.zeros((steps, num))
        logits = torch.empty(len(ends), self._vocabulary)
        threads = min(torch.get_num_threads(), MOST_THREADS)
        places = max((row.prompt.places if row.prompt else 0) + row.own.shape[-2] for row in rows)
        room = max(places // 2, self._vocabulary) + WIDE
        rooms = np.empty(threads * room)
        per_layer, beside = PHASES
        phases = np.zeros(steps * (per_layer * len(self._table) + beside) * PHASE, dtype=np.int64)
        held = {
            "row": table,
            "actives": actives,
            "end": end,
            "stop": stop,
            "temperature": temperature,
            "drawn": tokens,
            "logprob": logprobs,
            "room": rooms,
            "phase": phases,
        }
        batch = _Batch(
            rows=num,
            steps=steps,
            stops=len(stop),
            active=num,
            ends=len(ends),
            uniform=uniform.ctypes.data if drawing else None,
            rest=self._room(num),
            logits=logits.data_ptr(),
            room_of_thread=room,
            **{name: array.ctypes.data for name, array in held.items()},
        )

        def run(thread: int) -> None:
            self._step.decode(
                ctypes.byref(self._model), ctypes.byref(batch), ctypes.c_int64(thread)
            )

        together(run, threads)
        return logits, Drawn(*(_by_row(x, tokens) for x in (tokens, logprobs)))

    def _room(self, num_rows: int) -> int:
        decoder = self._decoder
        heads = 2 * (decoder.heads + decoder.kv_heads)
        floats = num_rows * (2 * self._hidden + heads * decoder.head_dim + self._inner)
        if len(self._rest) < floats:
            self._rest = self._rest.new_empty(floats)
        return self._rest.data_ptr()

    def _turn(self, positions: int) -> None:
        """Have the rotary embedding of so many positions at hand."""
        if self._turns.shape[1] < positions:
            upto = -(-positions // MORE_POSITIONS) * MORE_POSITIONS
            angles = torch.arange(upto)[:, None].float() * self._decoder.inverse_frequencies
            sin = torch.stack([-angles.sin(), angles.sin()], dim=-1).flatten(-2)
            cos = angles.cos().repeat_interleave(2, dim=-1)
            self._turns = torch.stack([cos, sin]) * self._decoder.rope_scale
            self._model.cos, self._model.sin = (part.data_ptr() for part in self._turns)


def native_of(decoder: Decoder, view: Trainable, bases: Bases) -> Native | None:
    """The version `view` for `decode.c`, where that can be compiled."""
    step = library("decode")
    return None if step is None else Native(step, decoder, bases.packed(decoder, view))


def fits(decoder: Decoder, view: Trainable) -> bool:
    """Whether `decode.c` reads models like this: its vectors are whole."""
    embedding = view.base["model.embed_tokens.weight"]
    inner = len(view.base[layer_module(0, "mlp.gate_proj.weight")])
    sizes = (embedding.shape[1], decoder.head_dim, inner)
    cpu_floats = embedding.device.type == "cpu" and embedding.dtype == torch.float32
    return cpu_floats and all(size % WIDE == 0 for size in sizes)


def _record(row: Reading) -> tuple[int, ...]:
    """A row as `decode.c` has it."""
    prompt, own = row.prompt, row.own
    shared = (prompt.data.data_ptr(), prompt.length, prompt.places) if prompt else (0, 0, 0)
    return (row.token, row.position, *shared, own.data_ptr(), own.shape[-2], row.left)


def _by_row(found: np.ndarray, tokens: np.ndarray) -> list[list]:
    """What was drawn, (steps, rows), row by row, as far as a row was drawn for."""
    many = (tokens >= 0).sum(axis=0).tolist()
    return [column[:num] for column, num in zip(found.T.tolist(), many, strict=True)]
