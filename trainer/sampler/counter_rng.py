"""The random numbers of sampling. They depend only on the place of a token in its run.

A key is the SHA-256 of (run seed, purpose, step, slot, replacement, sample, SHA-256 of the prompt ids,
occurrence). Philox, a counter-based generator, maps (key, completion position) to a uniform number. So a
draw cannot depend on the other rows of the batch, on their order, on timing, or on the death of a
process.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from schemas.sampling import DrawKey

BLOCK = 64
"""How many numbers are computed at a time. This does not change any number."""


def prompt_hash(ids: Sequence[int]) -> str:
    """SHA-256 of the prompt ids, as little-endian 32-bit integers."""
    return hashlib.sha256(np.asarray(ids, dtype="<u4").tobytes()).hexdigest()


class CounterRng:
    """The uniform numbers of one sampled completion, by position."""

    def __init__(self, key: DrawKey, *, seed: int, prompt: str, occurrence: int) -> None:
        parts = [
            seed,
            key.purpose,
            key.step,
            key.slot,
            key.replacement,
            key.sample,
            prompt,
            occurrence,
        ]
        digest = hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).digest()
        self._key = int.from_bytes(digest[:16], "little")
        self._block = -1
        self._values: list[float] = []

    @property
    def seed(self) -> int:
        """63 bits of the key, as the seed for an engine with its own random generator."""
        return self._key & ((1 << 63) - 1)

    def uniform_at(self, position: int) -> float:
        """A number in [0, 1) with 53 random bits."""
        block, offset = divmod(position, BLOCK)
        if block != self._block:
            generator = np.random.Philox(key=self._key, counter=block * BLOCK)
            bits = generator.random_raw(BLOCK) >> np.uint64(11)
            self._values = (bits * 2.0**-53).tolist()
            self._block = block
        return self._values[offset]
