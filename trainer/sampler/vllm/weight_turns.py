"""Turns of sets of weights on servers that compute with one set at a time.

With full tuning a server has the weights of one version, so requests for several versions take turns.
The turn changes while no request is in progress, so that no sample is drawn from two versions.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

BASE = "base"
"""The weights that a server was started with. LoRA runs sample on them, with their adapters."""
TURN_S = 5.0
"""How many seconds a turn admits further requests while others wait, because a change costs time."""


class WeightTurns:
    """Admits requests for one set of weights at a time, in the order in which the sets were asked for.
    All calls belong on one event loop."""

    def __init__(self) -> None:
        self._weights = BASE
        self._since = 0.0
        self._num_admitted = 0
        self._waiting: Counter[str] = Counter()
        self._changed = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        return not self._num_admitted and not self._waiting

    @asynccontextmanager
    async def take_turn(self, weights: str) -> AsyncIterator[None]:
        """Wait for the turn of these weights. No others have a turn inside the block."""
        self._waiting[weights] += 1
        try:
            while not self._may_enter(weights):
                await self._changed.wait()
        except asyncio.CancelledError:
            self._leave_line(weights)
            self._tell_change()
            raise
        self._leave_line(weights)
        if weights != self._weights:
            self._weights, self._since = weights, self._now()
        self._num_admitted += 1
        try:
            yield
        finally:
            self._num_admitted -= 1
            if not self._num_admitted:
                self._tell_change()

    def _may_enter(self, weights: str) -> bool:
        is_first = weights == next(iter(self._waiting))
        if weights != self._weights:
            return is_first and not self._num_admitted
        goes_on = self._num_admitted > 0 and self._now() < self._since + TURN_S
        return is_first or goes_on

    def _leave_line(self, weights: str) -> None:
        self._waiting[weights] -= 1
        if not self._waiting[weights]:
            del self._waiting[weights]

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
