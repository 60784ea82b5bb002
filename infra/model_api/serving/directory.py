"""The models that can be asked for by name: every deployment, and the base model that they share. A
deployment is also found by the name of its checkpoint, `BASE:RUN-step-N`.

What is deployed is read from the database at most once in KEPT_S seconds, and again when a name is not
known.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from infra.ports.actor import may_see
from infra.spine.ports.clock import Clock
from schemas.deployments import ServedModel

KEPT_S = 0.25


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A name and what answers to it: a deployment, or the base model of one (`is_base`)."""

    name: str
    served: ServedModel
    is_base: bool


class ModelDirectory:
    """Finds models for the actor of a request."""

    def __init__(self, read: Callable[[], Awaitable[Sequence[ServedModel]]], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._served: Sequence[ServedModel] = ()
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    async def find_model(self, name: str) -> ModelEntry | None:
        """The model with this name; None when there is none that the actor may use."""
        if self._clock.elapsed_s() - self._read_at < KEPT_S:
            found = self._find_known(name)
            if found is not None:
                return found
        await self._refresh()
        return self._find_known(name)

    async def all_models(self) -> list[ModelEntry]:
        """All models that the actor may use, with each base before its deployments."""
        await self._refresh()
        return self._entries()

    def _find_known(self, name: str) -> ModelEntry | None:
        entries = self._entries()
        for entry in entries:
            if entry.name == name:
                return entry
        deployed = (entry for entry in entries if not entry.is_base)
        return next((one for one in deployed if one.served.checkpoint_model == name), None)

    def _entries(self) -> list[ModelEntry]:
        visible = [served for served in self._served if may_see(served.workspace)]
        bases = {served.base_name: served for served in reversed(visible)}
        return [
            *(ModelEntry(name, served, is_base=True) for name, served in bases.items()),
            *(ModelEntry(served.model_name, served, is_base=False) for served in visible),
        ]

    async def _refresh(self) -> None:
        """Read what is deployed, once for all requests that wait for it."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read_all())
        await asyncio.shield(self._reading)

    async def _read_all(self) -> None:
        began = self._clock.elapsed_s()
        self._served = await self._read()
        self._read_at = began
