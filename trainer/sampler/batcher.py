"""Continuous batching: rows wait, enter a lane as there is room, decode, and leave when they are
over.

All of this runs on the device thread. Rows of one version and capacity share lanes; different
versions are served side by side, each in lanes of its own. Models outside the lean decoder's family
are sampled one row at a time through Transformers.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from trainer.forward.decoder import Decoder
from trainer.forward.weights import trainable
from trainer.sampler.completion import Row, Version, parameters
from trainer.sampler.cuda_graph_batch import GraphLane
from trainer.sampler.decode_batch import Lane, capacity_for, independent, row_bytes
from trainer.sampler.decode_model import Model, model_of
from trainer.sampler.draw_token import choose
from trainer.sampler.memory_limits import CPU, limits_of
from trainer.sampler.native.decode_batch import NativeLane
from trainer.sampler.native.packed_weights import Bases
from trainer.sampler.prefill import Prompt, Prompts
from trainer.weight_cache import Recent

FIXED_ROWS = 32
STEPS_PER_TURN = 16


class Core:
    """Lanes, prompts and the queue. Not thread-safe: the device thread owns it."""

    def __init__(self) -> None:
        self._limits = CPU
        self._waiting: deque[Row] = deque()
        self._lanes: dict[tuple[str, int, bool], list[Lane]] = {}
        self._prompts = Prompts()
        self._models: Recent[Model] = Recent(4)
        self._bases = Bases()
        self._sizes: dict[tuple[Decoder, int], int] = {}
        self._spare: list[Lane] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._lanes)

    def prepare(self, version: Version, *, fixed: bool) -> None:
        """Make a version ready before it is asked for."""
        self._model(version).prepare(fixed=fixed)

    def advance(self, arrivals: Sequence[Row], interrupted: Callable[[], bool]) -> list[Row]:
        """Take rows in and decode until one is over, more have arrived, or a turn is up. Returns
        the rows that are over."""
        if arrivals:
            self._limits = limits_of(arrivals[0].version.loaded.base.model.device)
        self._waiting.extend(arrivals)
        left = STEPS_PER_TURN
        while left > 0:
            over = self._admit()
            lanes = [lane for lanes in self._lanes.values() for lane in lanes]
            left -= max((lane.step() for lane in lanes), default=1)
            over += self._leave()
            if over or not self.busy or interrupted():
                break
        return over

    def _admit(self) -> list[Row]:
        """Read the prompts of all that wait, draw their first tokens, and put them into lanes.
        Returns those that are over at once."""
        over, lean = self._next()
        for fixed, batch in groupby(lean, key=lambda row: row.params.deterministic):
            members = list(batch)
            size = FIXED_ROWS if fixed else self._limits.most_rows
            for start in range(0, len(members), size):
                over += self._begin(members[start : start + size], fixed=fixed)
        return over

    def _next(self) -> tuple[list[Row], list[Row]]:
        """Rows that are over already (cancelled, or sampled through Transformers), and rows that
        enter a lane now: those there is memory for, in order of arrival."""
        over: list[Row] = []
        lean: list[Row] = []
        active = [lane for lanes in self._lanes.values() for lane in lanes]
        room = self._limits.rows_bytes - sum(lane.used_bytes for lane in active)
        while self._waiting:
            row = self._waiting[0]
            decoder = row.version.loaded.decoder
            if row.cancelled or decoder is None:
                over.append(row)
                if not row.cancelled:
                    sample_plainly(row)
            else:
                dtype = row.version.loaded.base.model.dtype
                room -= row_bytes(decoder, capacity_for(row.length + 1), dtype)
                if room < 0 and (lean or active):
                    break
                lean.append(row)
            self._waiting.popleft()
        return over, lean

    def _begin(self, rows: Sequence[Row], *, fixed: bool) -> list[Row]:
        prompts = self._read(rows, fixed=fixed)
        for vocabulary in {len(p.logits_V) for p in prompts}:
            alike = [i for i, p in enumerate(prompts) if len(p.logits_V) == vocabulary]
            size = FIXED_ROWS if fixed else len(alike)
            logits_R_V = torch.stack([prompts[i].logits_V for i in alike])
            if size > len(alike):
                spare = logits_R_V.new_zeros(size - len(alike), vocabulary)
                logits_R_V = torch.cat([logits_R_V, spare])
            drawn = choose(logits_R_V, **parameters([rows[i] for i in alike], size))
            for i, token, logprob in zip(alike, *drawn, strict=False):
                rows[i].take(token, logprob)
        for row, prompt in zip(rows, prompts, strict=True):
            if not row.over:
                self._lane_for(row).add(row, prompt)
        return [row for row in rows if row.over]

    def _read(self, rows: Sequence[Row], *, fixed: bool) -> list[Prompt]:
        """The prompt of each row; those of one version are read together."""
        found: dict[str, dict[tuple[int, ...], Prompt]] = {}
        for version in {row.version.key: row.version for row in rows}.values():
            asked = [row.prompt_ids for row in rows if row.version.key == version.key]
            model = self._model(version)
            found[version.key] = self._prompts.get(version.key, model, asked, fixed=fixed)
        return [found[row.version.key][row.prompt_ids] for row in rows]

    def _model(self, version: Version) -> Model:
        held = self._models.get(version.key)
        if held is not None:
            return held
        decoder, base = version.loaded.decoder, version.loaded.base
        assert decoder is not None  # noqa: S101 - rows without one never get here
        view = trainable(base.tensors, version.trained, alpha=version.alpha)
        num_bytes, copies = base.num_bytes, not self._limits.graphs
        made = model_of(decoder, view, num_bytes=num_bytes, copies=copies, bases=self._bases)
        return self._models.put(version.key, made)

    def _lane_for(self, row: Row) -> Lane:
        """A lane with room for this row."""
        fixed = row.params.deterministic
        capacity = self._kind(self._model(row.version), fixed=fixed).capacity_of(row)
        lanes = self._lanes.setdefault((row.version.key, capacity, fixed), [])
        lane = next((lane for lane in lanes if not lane.full), None)
        if lane is None:
            lane = self._new_lane(row.version, capacity, fixed=fixed)
            lanes.append(lane)
        return lane

    def _kind(self, model: Model, *, fixed: bool) -> type[Lane]:
        if fixed:
            return Lane
        if model.native is not None:
            return NativeLane
        return GraphLane if self._limits.graphs else Lane

    def _new_lane(self, version: Version, capacity: int, *, fixed: bool) -> Lane:
        model = self._model(version)
        decoder = model.decoder
        num_bytes = row_bytes(decoder, capacity, model.embedding.dtype)
        room = max(1, self._limits.lane_bytes // num_bytes)
        size = min(FIXED_ROWS if fixed else self._limits.most_rows, room)
        known = (decoder, capacity)
        if fixed and known not in self._sizes:
            trial = Lane(model, capacity=capacity, size=size, fixed=True)
            self._sizes[known] = size if independent(trial) else 1
        if fixed:
            size = self._sizes[known]
        kind = self._kind(model, fixed=fixed)
        for lane in self._spare:
            shape = (type(lane), lane.capacity, lane.size, lane.fixed)
            if shape == (kind, capacity, size, fixed) and lane.fits(model):
                self._spare.remove(lane)
                lane.adopt(model)
                return lane
        return kind(model, capacity=capacity, size=size, fixed=fixed)

    def _leave(self) -> list[Row]:
        """Take out the rows that are over, and move those that have outgrown their lane."""
        over: list[Row] = []
        for key, lanes in list(self._lanes.items()):
            for lane in lanes:
                for row in list(lane.rows):
                    if row.over:
                        lane.drop(row)
                        over.append(row)
                    elif lane.outgrown(row):
                        self._lane_for(row).take(row, lane)
            kept = [lane for lane in lanes if lane.rows]
            self._spare += [lane for lane in lanes if not lane.rows]
            if kept:
                self._lanes[key] = kept
            else:
                del self._lanes[key]
        while sum(lane.size * lane.row_bytes for lane in self._spare) > self._limits.spare_bytes:
            del self._spare[0]
        return over


@torch.no_grad()
def sample_plainly(row: Row) -> None:
    """Sample a whole completion through Transformers' module and cache, this row alone."""
    version = row.version
    fallback, device = version.loaded.fallback, version.loaded.base.model.device
    ids, cache = list(row.prompt_ids), None
    while not row.over:
        ids_T = torch.tensor(ids, device=device)
        logits_V, cache = fallback.extend(version.trained, ids_T, cache, alpha=version.alpha)
        tokens, logprobs = choose(logits_V[None], **parameters([row], 1))
        row.take(tokens[0], logprobs[0])
        ids = row.completion_ids[-1:]
