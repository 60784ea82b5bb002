"""A decode batch whose rows are read and drawn in C, several steps per call.

Rows use their prompt's cache where it is, and keep a cache of only the tokens that they drew themselves.
So samples of a group share one prompt's cache, which stays in the processor's caches. A row that ends
drops out within a call.
"""

from collections.abc import Sequence

from trainer.native.interface import Drawing, KeyValueCache, NativeDecoder, RowInput
from trainer.sampler.completion import Completion, draw_parameters
from trainer.sampler.decode_batch import DecodeBatch, capacity_for
from trainer.sampler.decode_model import DecodeModel
from trainer.sampler.draw_token import draw_tokens
from trainer.sampler.prefill import NativePrompt, Prompt

BURST = 8
"""Steps of a narrow model per call. New rows join, and stop strings are found, only between calls. A
step of a wider model takes so long that a call for each costs nothing."""
ROOM = 64
"""How many places a row begins with, if it may draw that many tokens. Most rows then never move."""


def _native_decoder_of(model: DecodeModel) -> NativeDecoder:
    if model.native_decoder is None:
        raise ValueError("this version does not run in C: use another kind of batch")
    return model.native_decoder


class NativeBatch(DecodeBatch):
    """Up to `size` rows of one version, each with room for `capacity` tokens of its answer."""

    def __init__(
        self, model: DecodeModel, *, capacity: int, size: int, fixed: bool = False
    ) -> None:
        super().__init__(model, capacity=capacity, size=size, fixed=fixed)
        self._prompts: list[KeyValueCache] = []
        self._slots: list[int] = []
        self._free = list(range(size))

    def _allocate(self) -> None:
        self._own = _native_decoder_of(self.model).cache(self.capacity, self.size)

    @staticmethod
    def capacity_of(row: Completion) -> int:
        return capacity_for(max(len(row.completion_ids), min(row.max_new_tokens, ROOM)))

    @property
    def used_bytes(self) -> int:
        prompts = {id(prompt): prompt.data.nbytes for prompt in self._prompts}
        return super().used_bytes + sum(prompts.values())

    def is_outgrown_by(self, row: Completion) -> bool:
        return len(row.completion_ids) > self.capacity

    def add(self, row: Completion, prompt: Prompt) -> None:
        """Take a row in that has drawn its first token."""
        if not isinstance(prompt, NativePrompt):
            kind = type(prompt).__name__
            raise TypeError(f"a {kind} is not a prompt for this batch: read it in C")
        self._enter(row, prompt.cache)

    def take_over(self, row: Completion, other: DecodeBatch) -> None:
        if not isinstance(other, NativeBatch):
            raise TypeError(f"a row of a {type(other).__name__} cannot move to a NativeBatch")
        at = other.rows.index(row)
        held = other._own[other._slots[at]]
        self._own[self._enter(row, other._prompts[at]), :, :, :, : held.shape[-2]] = held
        other.remove(row)

    def _enter(self, row: Completion, prompt: KeyValueCache) -> int:
        """Give a row a slot. Returns the slot."""
        self.rows.append(row)
        self._prompts.append(prompt)
        self._slots.append(self._free.pop())
        return self._slots[-1]

    def remove(self, row: Completion) -> None:
        at = self.rows.index(row)
        self._free.append(self._slots.pop(at))
        self._prompts.pop(at)
        self.rows.pop(at)

    def step(self) -> int:
        """Draw the next tokens of every row, of a narrow model up to BURST of them, and one of a
        constrained row. Returns how many steps of a turn that counts as."""
        if any(row.params.top_p < 1 for row in self.rows):
            self._draw_one(self.rows)
            return 1
        self._draw_one([row for row in self.rows if row.grammar is not None])
        free = [row for row in self.rows if row.grammar is None]
        return self._draw_burst(free) if free else 1

    def _draw_one(self, rows: Sequence[Completion]) -> None:
        if not rows:
            return
        logits_R_V = _native_decoder_of(self.model).logits(self._readings(rows))
        drawn = draw_tokens(logits_R_V, **draw_parameters(rows, len(rows)))
        for row, token, logprob in zip(rows, *drawn, strict=True):
            row.append(token, logprob)

    def _draw_burst(self, rows: Sequence[Completion]) -> int:
        """Returns how many steps it took."""
        turns = self._turns(rows)
        uniforms = [[row.uniform(turn) for row in rows] for turn in range(turns)]
        temperatures = [row.params.temperature for row in rows]
        found = _native_decoder_of(self.model).draw(
            self._readings(rows), Drawing(uniforms, temperatures, tuple(rows[0].stop_ids))
        )
        for row, tokens, logprobs in zip(rows, found.tokens, found.logprobs, strict=True):
            for token, logprob in zip(tokens, logprobs, strict=True):
                if not row.is_over:
                    row.append(token, logprob)
        return turns

    def _turns(self, rows: Sequence[Completion]) -> int:
        """As many steps as the longest row has room for, and no more than any row may still draw."""
        room = self.capacity + 1 - max(len(row.completion_ids) for row in rows)
        wanted = max(row.max_new_tokens - len(row.completion_ids) for row in rows)
        most = BURST if self.model.is_narrow else 1
        return max(1, min(most, room, wanted))

    def _readings(self, rows: Sequence[Completion]) -> list[RowInput]:
        places = {id(row): place for place, row in enumerate(self.rows)}
        return [
            RowInput(
                row.completion_ids[-1],
                row.length - 1,
                self._own[self._slots[place]],
                self._prompts[place],
                row.max_new_tokens - len(row.completion_ids),
            )
            for row, place in ((row, places[id(row)]) for row in rows)
        ]
