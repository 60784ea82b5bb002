"""How many answers are sampled at the same time. A vLLM server shares its time evenly among the answers
of its batch, so while a run trains, fewer answers of deployments are in it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

LOOK_AGAIN_S = 1.0
"""How often a call that waits asks again how many there may be."""


class AnswerTurns:
    """Turns for calls. `most` returns how many may have one now, at least 1."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._num = 0
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, and keep it inside the block."""
        while self._num >= max(1, self._most()):
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._freed.wait()
        self._num += 1
        try:
            yield
        finally:
            self._num -= 1
            self._freed.set()
