"""The sampler's reading and drawing, in C (`trainer/native/decode.c`).

Rows are computed independently of one another. The work is split over the device's threads, and the
number of threads changes no bit. Without a compiler, or for a model that C does not support, the sampler
works through torch (`trainer/sampler/decode_model.py`), which rounds differently.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from trainer.forward.decoder import Decoder
from trainer.forward.weights import Trainable
from trainer.native.compile import load_library
from trainer.native.packed_weights import LAYER, WIDE, PackedBases, PackedWeights
from trainer.native.supported_models import can_decode
from trainer.native.threads import run_on_threads

PHASES, PHASE = (8, 6), 8
"""Phases of a step, per layer and for the rest, and the integers that each takes."""
PASS_ROWS = 512
"""Tokens of prompts that are read together. More would not fit into the processor's caches."""
FEWEST_SAVED = 16
"""How many tokens must be left out for a pass of their own over what prompts begin with. A pass reads
all weights, which takes as long as computing about so many tokens."""
MORE_POSITIONS = 512
MOST_THREADS = 16
"""A matrix of a narrow model has about sixteen panels, so more threads would find nothing to do."""

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
class KeyValueCache:
    """The keys and values of `length` tokens, (2, layers, K, places, D), as `decode.c` lays them out."""

    data: torch.Tensor
    length: int

    @property
    def places(self) -> int:
        return self.data.shape[3]


@dataclass(frozen=True, slots=True, eq=False)
class RowInput:
    """The next token that a row reads, and its position. The `prompt` before it may be shared with other
    rows. `own` is the row's cache, (2, layers, K, places, D); `left` is how many tokens it may still
    draw."""

    token: int
    position: int
    own: torch.Tensor
    prompt: KeyValueCache | None = None
    left: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """How tokens are drawn: a uniform number per step and row, and a temperature per row."""

    uniforms: Sequence[Sequence[float]]
    temperatures: Sequence[float]
    stop_ids: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class DrawnTokens:
    """Tokens and logprobs, row by row. The last token of a row is the one that ended it."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


class NativeDecoder:
    """A version that `decode.c` reads."""

    def __init__(self, library: ctypes.CDLL, decoder: Decoder, weights: PackedWeights) -> None:
        self._library, self._decoder, self._weights = library, decoder, weights
        self._hidden, self._vocabulary = len(weights.norm), len(weights.embedding)
        self._inner = weights.layers[0]["down"].shape[1]
        self._rest = weights.norm.new_empty(0)
        self._rotations = weights.norm.new_empty(2, 0, decoder.head_dim)
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
        """Empty room for the keys and values of that many places, rounded up to whole vectors,
        (*rows, 2, layers, K, places, D)."""
        decoder = self._decoder
        places = -(-places // WIDE) * WIDE
        shape = (2, decoder.num_layers, decoder.kv_heads, places, decoder.head_dim)
        return torch.empty((*rows, *shape))

    def read(self, prompts: Sequence[Sequence[int]]) -> list[tuple[KeyValueCache, torch.Tensor]]:
        """The cache of each prompt, and the logits (V) after its last token. What all prompts begin with
        is read once. The other tokens are read PASS_ROWS at a time, wherever a prompt ends. No bit
        depends on that."""
        caches = [KeyValueCache(self.cache(len(ids)), len(ids)) for ids in prompts]
        common = _common_length(prompts)
        if common * (len(prompts) - 1) < FEWEST_SAVED:
            common = 0
        if common:
            self._read_beginning(prompts[0][:common], caches)
        rows = [
            RowInput(token, position, cache.data)
            for ids, cache in zip(prompts, caches, strict=True)
            for position, token in enumerate(ids[common:], start=common)
        ]
        last = np.cumsum([len(ids) - common for ids in prompts]) - 1
        found = []
        for start in range(0, len(rows), PASS_ROWS):
            part = rows[start : start + PASS_ROWS]
            ends = [int(end) - start for end in last if start <= end < start + len(part)]
            found += list(self.logits(part, ends=ends))
        return list(zip(caches, found, strict=True))

    def _read_beginning(self, ids: Sequence[int], caches: Sequence[KeyValueCache]) -> None:
        """Read these tokens into each cache. Whole vectors are copied; the next tokens overwrite what is
        behind the last one."""
        first, *others = caches
        rows = [RowInput(token, position, first.data) for position, token in enumerate(ids)]
        for start in range(0, len(rows), PASS_ROWS):
            self.logits(rows[start : start + PASS_ROWS], ends=())
        places = -(-len(ids) // WIDE) * WIDE
        for cache in others:
            cache.data[:, :, :, :places] = first.data[:, :, :, :places]

    def logits(
        self, rows: Sequence[RowInput], *, ends: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Read one token per row. Returns the logits after the rows of `ends`, (ends, V); None: all."""
        logits, _ = self._run(rows, range(len(rows)) if ends is None else ends, None)
        return logits

    def draw(self, rows: Sequence[RowInput], drawing: Drawing) -> DrawnTokens:
        """Read one token per row and draw the next, for as many steps as there are uniform numbers. A
        row ends when it draws a stop id, its last allowed token, or a logprob that is not finite."""
        _, drawn = self._run(rows, range(len(rows)), drawing)
        return drawn

    def _run(
        self, rows: Sequence[RowInput], ends: Sequence[int], drawing: Drawing | None
    ) -> tuple[torch.Tensor, DrawnTokens]:
        num, steps = len(rows), len(drawing.uniforms) if drawing else 1
        self._extend_rotations(max(row.position for row in rows) + steps)
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
            self._library.decode(
                ctypes.byref(self._model), ctypes.byref(batch), ctypes.c_int64(thread)
            )

        run_on_threads(run, threads)
        return logits, DrawnTokens(*(_by_row(x, tokens) for x in (tokens, logprobs)))

    def _room(self, num_rows: int) -> int:
        decoder = self._decoder
        heads = 2 * (decoder.heads + decoder.kv_heads)
        floats = num_rows * (2 * self._hidden + heads * decoder.head_dim + self._inner)
        if len(self._rest) < floats:
            self._rest = self._rest.new_empty(floats)
        return self._rest.data_ptr()

    def _extend_rotations(self, positions: int) -> None:
        """Make the table of the rotary embedding at least that many positions long."""
        if self._rotations.shape[1] < positions:
            upto = -(-positions // MORE_POSITIONS) * MORE_POSITIONS
            angles = torch.arange(upto)[:, None].float() * self._decoder.rope.inverse_frequencies
            sin = torch.stack([-angles.sin(), angles.sin()], dim=-1).flatten(-2)
            cos = angles.cos().repeat_interleave(2, dim=-1)
            self._rotations = torch.stack([cos, sin]) * self._decoder.rope.scale
            self._model.cos, self._model.sin = (part.data_ptr() for part in self._rotations)


def native_decoder(
    decoder: Decoder, view: Trainable, bases: PackedBases, *, takes_wide: bool = False
) -> NativeDecoder | None:
    """The version `view` for `decode.c`; None where it is sampled through torch, because the model is
    not supported, or wide without `takes_wide`, or there is no compiler. `bases`: the packed bases of
    other versions."""
    if not can_decode(decoder, view, takes_wide=takes_wide):
        return None
    library = load_library("decode")
    if library is None:
        return None
    with torch.no_grad():
        return NativeDecoder(library, decoder, bases.pack(decoder, view))


def _common_length(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all of several prompts begin with. The last token of each is not counted, because
    its logits are wanted."""
    if len(prompts) < 2:
        return 0
    alike = zip(*(ids[:-1] for ids in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, alike))


def _record(row: RowInput) -> tuple[int, ...]:
    """A row as `decode.c` reads it."""
    prompt, own = row.prompt, row.own
    shared = (prompt.data.data_ptr(), prompt.length, prompt.places) if prompt else (0, 0, 0)
    return (row.token, row.position, *shared, own.data_ptr(), own.shape[-2], row.left)


def _by_row(values: np.ndarray, tokens: np.ndarray) -> list[list[Any]]:
    """The values drawn, (steps, rows), as one list per row that ends where the row ended."""
    counts = (tokens >= 0).sum(axis=0).tolist()
    return [column[:num] for column, num in zip(values.T.tolist(), counts, strict=True)]
