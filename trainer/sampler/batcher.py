"""Continuous batching: rows wait, enter a batch when there is room, decode, and leave when they have
ended. A row is one completion.

All of this runs on the device thread. Rows of one version and capacity share batches. Different
versions are served at the same time, each in batches of its own. Models that the lean decoder does not
support are sampled through Transformers (`trainer/sampler/general_batch.py`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from schemas.sampling import SamplingParams
from trainer.forward.decoder import Decoder
from trainer.forward.weights import trainable_view
from trainer.lru_cache import LruCache
from trainer.native.interface import PackedBases
from trainer.sampler.completion import Completion, Version, draw_parameters
from trainer.sampler.cuda_graph_batch import CudaGraphBatch
from trainer.sampler.decode_batch import DecodeBatch, capacity_for, has_independent_rows, row_bytes
from trainer.sampler.decode_model import DecodeModel, decode_model_of, native_for
from trainer.sampler.draw_token import draw_tokens
from trainer.sampler.general_batch import batches_of, sample_through_transformers
from trainer.sampler.memory_limits import CPU, memory_limits_of
from trainer.sampler.native_batch import NativeBatch
from trainer.sampler.prefill import Prompt
from trainer.sampler.prompt_cache import PromptCache

FIXED_ROWS = 32
STEPS_PER_TURN = 16
KEPT_MODELS = 4


class Batcher:
    """The decode batches, the prompts that were read, and the queue of rows. It is not thread-safe,
    because only the device thread uses it."""

    def __init__(self, *, models: int = KEPT_MODELS) -> None:
        """`models` is how many versions stay prepared for decoding."""
        self._limits = CPU
        self._waiting: deque[Completion] = deque()
        self._batches: dict[tuple[str, int, bool, type[DecodeBatch]], list[DecodeBatch]] = {}
        self._prompts = PromptCache()
        self._models: LruCache[DecodeModel] = LruCache(models)
        self._bases = PackedBases()
        self._sizes: dict[tuple[Decoder, int], int] = {}
        self._spare: list[DecodeBatch] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._batches)

    def prepare(self, version: Version, params: SamplingParams) -> None:
        """Prepare a version before the first request for it, which will have such params."""
        model = self._model(version)
        if native_for(model, params) is None:
            model.prepare()

    def advance(
        self, arrivals: Sequence[Completion], is_interrupted: Callable[[], bool]
    ) -> list[Completion]:
        """Add the rows that arrived, and decode until a row ends, until `is_interrupted` returns True
        because more have arrived, or for STEPS_PER_TURN steps. Returns the rows that have ended."""
        if arrivals:
            self._limits = memory_limits_of(arrivals[0].version.loaded.base.model.device)
        self._waiting.extend(arrivals)
        left = STEPS_PER_TURN
        while left > 0:
            over = self._admit()
            batches = [batch for batches in self._batches.values() for batch in batches]
            left -= max((batch.step() for batch in batches), default=1)
            over += self._leave()
            if over or not self.is_busy or is_interrupted():
                break
        return over

    def _admit(self) -> list[Completion]:
        """Read the prompts of the waiting rows, draw their first tokens, and put them into batches.
        Returns the rows that have already ended."""
        over, lean = self._next()
        for (fixed, _), batch in groupby(lean, key=_kind):
            members = list(batch)
            size = FIXED_ROWS if fixed else self._limits.most_rows
            prompts = self._read(members)
            for start in range(0, len(members), size):
                part = slice(start, start + size)
                over += self._begin(members[part], prompts[part], fixed=fixed)
        return over

    def _next(self) -> tuple[list[Completion], list[Completion]]:
        """The rows that have already ended (cancelled, or sampled through Transformers), and the rows
        that enter a batch now. These are as many as there is memory for, in order of arrival."""
        over = [row for row in self._waiting if row.is_cancelled]
        self._waiting = deque(row for row in self._waiting if not row.is_cancelled)
        lean, general = list[Completion](), list[Completion]()
        active = [batch for batches in self._batches.values() for batch in batches]
        room = self._limits.rows_bytes - sum(batch.used_bytes for batch in active)
        while self._waiting:
            row = self._waiting[0]
            decoder = row.version.loaded.decoder
            if decoder is None:
                general.append(row)
            else:
                dtype = row.version.loaded.base.model.dtype
                room -= row_bytes(decoder, capacity_for(row.length + 1), dtype)
                if room < 0 and (lean or active):
                    break
                lean.append(row)
            self._waiting.popleft()
        for rows in batches_of(general, limits=self._limits):
            sample_through_transformers(rows)
        return over + general, lean

    def _begin(
        self, rows: Sequence[Completion], prompts: Sequence[Prompt], *, fixed: bool
    ) -> list[Completion]:
        """Draw the first tokens of these rows, and put them into batches. Returns the rows that have
        already ended."""
        for vocabulary in {len(p.logits_V) for p in prompts}:
            alike = [i for i, p in enumerate(prompts) if len(p.logits_V) == vocabulary]
            size = FIXED_ROWS if fixed else len(alike)
            logits_R_V = torch.stack([prompts[i].logits_V for i in alike])
            if size > len(alike):
                spare = logits_R_V.new_zeros(size - len(alike), vocabulary)
                logits_R_V = torch.cat([logits_R_V, spare])
            drawn = draw_tokens(logits_R_V, **draw_parameters([rows[i] for i in alike], size))
            for i, token, logprob in zip(alike, *drawn, strict=False):
                rows[i].append(token, logprob)
        for row, prompt in zip(rows, prompts, strict=True):
            if not row.is_over:
                self._batch_for(row).add(row, prompt)
        return [row for row in rows if row.is_over]

    def _read(self, rows: Sequence[Completion]) -> list[Prompt]:
        """The prompt of each row. Prompts of one version are read together. The rows are of one
        kind."""
        found: dict[str, dict[tuple[int, ...], Prompt]] = {}
        for version in {row.version.key: row.version for row in rows}.values():
            prompts = [row.prompt_ids for row in rows if row.version.key == version.key]
            model = self._model(version)
            native = native_for(model, rows[0].params)
            found[version.key] = self._prompts.get(version.key, model, prompts, native=native)
        return [found[row.version.key][row.prompt_ids] for row in rows]

    def _model(self, version: Version) -> DecodeModel:
        held = self._models.get(version.key)
        if held is not None:
            return held
        decoder, base = version.loaded.decoder, version.loaded.base
        assert decoder is not None  # noqa: S101 - rows without one never get here
        view = trainable_view(base.tensors, version.trained, scaling=version.scaling)
        num_bytes, copies = base.num_bytes, not self._limits.uses_graphs
        made = decode_model_of(decoder, view, num_bytes=num_bytes, copies=copies, bases=self._bases)
        return self._models.put(version.key, made)

    def _batch_for(self, row: Completion) -> DecodeBatch:
        """A batch with room for this row. It is made if there is none."""
        model, fixed = self._model(row.version), row.params.deterministic
        kind = self._batch_class(model, row.params)
        capacity = kind.capacity_of(row)
        batches = self._batches.setdefault((row.version.key, capacity, fixed, kind), [])
        batch = next((batch for batch in batches if not batch.is_full), None)
        if batch is None:
            batch = self._new_batch(kind, model, capacity, fixed=fixed)
            batches.append(batch)
        return batch

    def _batch_class(self, model: DecodeModel, params: SamplingParams) -> type[DecodeBatch]:
        if params.deterministic:
            return DecodeBatch
        if native_for(model, params) is not None:
            return NativeBatch
        return CudaGraphBatch if self._limits.uses_graphs else DecodeBatch

    def _new_batch(
        self, kind: type[DecodeBatch], model: DecodeModel, capacity: int, *, fixed: bool
    ) -> DecodeBatch:
        decoder = model.decoder
        num_bytes = row_bytes(decoder, capacity, model.embedding.dtype)
        room = max(1, self._limits.batch_bytes // num_bytes)
        size = min(FIXED_ROWS if fixed else self._limits.most_rows, room)
        known = (decoder, capacity)
        if fixed and known not in self._sizes:
            trial = DecodeBatch(model, capacity=capacity, size=size, fixed=True)
            self._sizes[known] = size if has_independent_rows(trial) else 1
        if fixed:
            size = self._sizes[known]
        for batch in self._spare:
            shape = (type(batch), batch.capacity, batch.size, batch.fixed)
            if shape == (kind, capacity, size, fixed) and batch.can_serve(model):
                self._spare.remove(batch)
                batch.serve(model)
                return batch
        return kind(model, capacity=capacity, size=size, fixed=fixed)

    def _leave(self) -> list[Completion]:
        """Remove and return the rows that have ended, and move those that have outgrown their batch."""
        over: list[Completion] = []
        for key, batches in list(self._batches.items()):
            for batch in batches:
                for row in list(batch.rows):
                    if row.is_over:
                        batch.remove(row)
                        over.append(row)
                    elif batch.is_outgrown_by(row):
                        self._batch_for(row).take_over(row, batch)
            kept = [batch for batch in batches if batch.rows]
            self._spare += [batch for batch in batches if not batch.rows]
            if kept:
                self._batches[key] = kept
            else:
                del self._batches[key]
        while sum(batch.size * batch.row_bytes for batch in self._spare) > self._limits.spare_bytes:
            del self._spare[0]
        return over


def _kind(row: Completion) -> tuple[bool, bool]:
    """Rows that are read and drawn together are equal in this."""
    return row.params.deterministic, row.params.allows_wide_native
