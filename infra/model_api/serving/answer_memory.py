"""Bounds the memory of the answers that are sampled or not yet read: those of one key, and those of the
deployments of one workspace.

An answer stays in memory until its client has read it, and a client may read slowly or never. So the
most that an answer may take is counted before it is sampled, and what does not fit waits. A key whose
client does not read makes its own requests wait, and at most those of its own workspace.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from infra.model_api.wire.errors import GatewayError
from schemas.sampling import SampleRequest

MIB = 1 << 20
ANSWERS_OF_A_KEY = 256 * MIB
ANSWERS_OF_A_WORKSPACE = 512 * MIB

TOKEN_BYTES = 64
"""Of a token of an answer: its id, its logprob and its text."""
LIKELY_BYTES = 640
"""Of one of the likeliest tokens in the place of a token, with what is written for it."""
MOST_TOKENS = 1 << 17
"""A `max_tokens` beyond this counts as this, because no context is longer."""


def most_bytes(requests: Sequence[SampleRequest]) -> int:
    """The most memory that the answers of a call may take."""
    return sum(
        min(one.params.max_new_tokens, MOST_TOKENS)
        * (TOKEN_BYTES + LIKELY_BYTES * (one.likeliest or (1 if one.pieces else 0)))
        for one in requests
    )


class AnswerMemory:
    """Counts the memory of answers, for each key and each workspace."""

    def __init__(
        self, *, of_key: int = ANSWERS_OF_A_KEY, of_workspace: int = ANSWERS_OF_A_WORKSPACE
    ) -> None:
        self._of_key = of_key
        self._of_workspace = of_workspace
        self._held: Counter[str] = Counter()
        self._freed = asyncio.Event()

    @contextmanager
    def claim(self, key: str, workspace: str | None, num_bytes: int) -> Iterator["MemoryClaim"]:
        """Claim memory for the answers of a call, which is held from `wait` until the block ends. Raises
        GatewayError (400) when they can never fit."""
        if num_bytes > self._of_key:
            raise GatewayError(
                400,
                "answer_too_large",
                f"the answers may take {num_bytes // MIB} MiB of memory, of at most "
                f"{self._of_key // MIB}; ask for fewer max_tokens, choices (n) or likeliest tokens",
            )
        most = {f"key {key}": self._of_key, f"workspace {workspace or ''}": self._of_workspace}
        claim = MemoryClaim(self, most, num_bytes)
        try:
            yield claim
        finally:
            claim.release()

    async def wait_for_room(self, most: dict[str, int], num_bytes: int) -> None:
        """Wait until none of these holders would have more than its limit, and count the bytes."""
        while any(self._held[name] + num_bytes > limit for name, limit in most.items()):
            self._freed.clear()
            await self._freed.wait()
        self._held.update(dict.fromkeys(most, num_bytes))

    def free(self, most: dict[str, int], num_bytes: int) -> None:
        """Count the bytes of these holders no more."""
        for name in most:
            self._held[name] -= num_bytes
            if not self._held[name]:
                del self._held[name]
        self._freed.set()


class MemoryClaim:
    """The memory that the answers of one call may take."""

    def __init__(self, of: AnswerMemory, most: dict[str, int], num_bytes: int) -> None:
        self._of = of
        self._most = most
        self._num_bytes = num_bytes
        self._is_held = False

    async def wait(self) -> None:
        """Wait until there is room, and hold it."""
        await self._of.wait_for_room(self._most, self._num_bytes)
        self._is_held = True

    def release(self) -> None:
        """Let others have the memory."""
        if self._is_held:
            self._is_held = False
            self._of.free(self._most, self._num_bytes)
