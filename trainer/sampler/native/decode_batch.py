"""A lane whose rows are read and drawn in C, several steps a call.

Rows see their prompt where it was read, and keep only what they drew themselves: samples of a group
read one prompt's cache, which stays near the processor. Rows that end drop out within a call.
"""

from trainer.sampler.completion import Row, parameters
from trainer.sampler.decode_batch import Lane, capacity_for
from trainer.sampler.decode_model import Model
from trainer.sampler.draw_token import choose
from trainer.sampler.native.calls import Cache, Drawing, Native, Reading
from trainer.sampler.prefill import NativePrompt, Prompt

BURST = 8
"""Steps between two looks of the host: so late newcomers may join, and a row that said a stop string
may be heard."""
ROOM = 64
"""Places that a row begins with, if it may draw that many; most then never move."""


def native_of(model: Model) -> Native:
    if model.native is None:
        raise ValueError("this model is not read in C")
    return model.native


class NativeLane(Lane):
    """Up to `size` rows of one version, `capacity` tokens of an answer each."""

    def __init__(self, model: Model, *, capacity: int, size: int, fixed: bool = False) -> None:
        super().__init__(model, capacity=capacity, size=size, fixed=fixed)
        self._prompts: list[Cache] = []
        self._slots: list[int] = []
        self._free = list(range(size))

    def _allocate(self) -> None:
        self._own = native_of(self.model).cache(self.capacity, self.size)

    @staticmethod
    def capacity_of(row: Row) -> int:
        return capacity_for(max(len(row.completion_ids), min(row.max_new_tokens, ROOM)))

    @property
    def used_bytes(self) -> int:
        prompts = {id(prompt): prompt.data.nbytes for prompt in self._prompts}
        return super().used_bytes + sum(prompts.values())

    def outgrown(self, row: Row) -> bool:
        return len(row.completion_ids) > self.capacity

    def add(self, row: Row, prompt: Prompt) -> None:
        """Take a row in that has drawn its first token."""
        if not isinstance(prompt, NativePrompt):
            raise TypeError("a prompt for this lane is read in C")
        self._enter(row, prompt.cache)

    def take(self, row: Row, other: Lane) -> None:
        if not isinstance(other, NativeLane):
            raise TypeError("a row stays among lanes of its kind")
        at = other.rows.index(row)
        held = other._own[other._slots[at]]
        self._own[self._enter(row, other._prompts[at]), :, :, :, : held.shape[-2]] = held
        other.drop(row)

    def _enter(self, row: Row, prompt: Cache) -> int:
        """Give a row a slot."""
        self.rows.append(row)
        self._prompts.append(prompt)
        self._slots.append(self._free.pop())
        return self._slots[-1]

    def drop(self, row: Row) -> None:
        at = self.rows.index(row)
        self._free.append(self._slots.pop(at))
        self._prompts.pop(at)
        self.rows.pop(at)

    def step(self) -> int:
        """Draw the next tokens of every row, up to BURST of them."""
        native, rows = native_of(self.model), self.rows
        if any(row.params.top_p < 1 for row in rows):
            drawn = choose(native.logits(self._readings()), **parameters(rows, len(rows)))
            for row, token, logprob in zip(rows, *drawn, strict=True):
                row.take(token, logprob)
            return 1
        turns = self._turns()
        uniforms = [[row.uniform(turn) for row in rows] for turn in range(turns)]
        temperatures = [row.params.temperature for row in rows]
        found = native.draw(
            self._readings(), Drawing(uniforms, temperatures, tuple(rows[0].stop_ids))
        )
        for row, tokens, logprobs in zip(rows, found.tokens, found.logprobs, strict=True):
            for token, logprob in zip(tokens, logprobs, strict=True):
                if not row.over:
                    row.take(token, logprob)
        return turns

    def _turns(self) -> int:
        """As many steps as the longest row has room for, and no more than any row may still draw."""
        room = self.capacity + 1 - max(len(row.completion_ids) for row in self.rows)
        wanted = max(row.max_new_tokens - len(row.completion_ids) for row in self.rows)
        return max(1, min(BURST, room, wanted))

    def _readings(self) -> list[Reading]:
        return [
            Reading(
                row.completion_ids[-1],
                row.length - 1,
                self._own[slot],
                prompt,
                row.max_new_tokens - len(row.completion_ids),
            )
            for row, slot, prompt in zip(self.rows, self._slots, self._prompts, strict=True)
        ]
