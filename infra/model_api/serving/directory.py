"""The models that can be asked for by name: every deployment, and the base model that they share. A
deployment is also found by the name of its checkpoint, `BASE:RUN-step-N`.

A name is unique in its workspace. Who sees several workspaces with a model of one name writes
`BASE:WORKSPACE/NAME`, which always works.

What is deployed is read from the database at most once in KEPT_S seconds, and again when a name is not
known.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from infra.model_api.wire.errors import GatewayError
from infra.ports.actor import may_see
from infra.spine.ports.clock import Clock
from schemas.deployments import NO_WORKSPACE, ActiveModel, ServedModel, checkpoint_name, in_place

KEPT_S = 0.25


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A name and what answers to it: a deployment, or the base model of one (`is_base`)."""

    name: str
    served: ServedModel
    is_base: bool


class ModelDirectory:
    """Finds models for the actor of a request."""

    def __init__(self, read: Callable[[], Awaitable[Sequence[ActiveModel]]], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._served: Sequence[ActiveModel] = ()
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    async def find_model(self, name: str) -> ModelEntry | None:
        """The model with this name; None when there is none that the actor may use. Raises GatewayError
        (400) when there are several."""
        if self._clock.elapsed_s() - self._read_at < KEPT_S:
            found = self._find_known(name)
            if found is not None:
                return found
        await self._refresh()
        return self._find_known(name)

    async def all_models(self) -> list[ModelEntry]:
        """All models that the actor may use, with each base before its deployments. The name of each
        means it alone."""
        await self._refresh()
        visible = self._visible()
        names = Counter(one.served.model_name for one in visible)
        deployed = (
            ModelEntry(
                one.served.model_name if names[one.served.model_name] == 1 else _full(one, visible),
                one.served,
                is_base=False,
            )
            for one in visible
        )
        return [*_bases(visible), *deployed]

    def _find_known(self, name: str) -> ModelEntry | None:
        visible = self._visible()
        for entry in _bases(visible):
            if entry.name == name:
                return entry
        named = [one for one in visible if _is_named(one, name, one.served.name)]
        found = named or _one_of_each(
            one for one in visible if _is_named(one, name, _checkpoint(one.served))
        )
        if len(found) > 1:
            choices = ", ".join(_full(one, found, name=name) for one in found)
            raise GatewayError(
                400,
                "ambiguous_model",
                f"{len(found)} workspaces have a model {name}; name one of {choices}, or use an API key "
                "of its workspace",
                parameter="model",
            )
        return ModelEntry(name, found[0].served, is_base=False) if found else None

    def _visible(self) -> list[ActiveModel]:
        return [one for one in self._served if may_see(one.served.workspace)]

    async def _refresh(self) -> None:
        """Read what is deployed, once for all requests that wait for it."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read_all())
        await asyncio.shield(self._reading)

    async def _read_all(self) -> None:
        began = self._clock.elapsed_s()
        self._served = await self._read()
        self._read_at = began


def _bases(visible: Sequence[ActiveModel]) -> list[ModelEntry]:
    bases = {one.served.base_name: one.served for one in reversed(visible)}
    return [ModelEntry(name, served, is_base=True) for name, served in bases.items()]


def _checkpoint(served: ServedModel) -> str:
    return checkpoint_name(served.run_name, served.step)


def _is_named(one: ActiveModel, name: str, own: str) -> bool:
    """Whether `name` is BASE:OWN or BASE:WORKSPACE/OWN."""
    base = f"{one.served.base_name}:"
    if not name.startswith(base):
        return False
    place, slash, last = name.removeprefix(base).rpartition("/")
    return last == own and (not slash or in_place(place, one.served.workspace, one.workspace_name))


def _one_of_each(found: Iterable[ActiveModel]) -> list[ActiveModel]:
    """The first model of each workspace: a checkpoint may be deployed there under several names."""
    first: dict[str | None, ActiveModel] = {}
    for one in found:
        first.setdefault(one.served.workspace, one)
    return list(first.values())


def _full(one: ActiveModel, others: Sequence[ActiveModel], *, name: str | None = None) -> str:
    """BASE:WORKSPACE/NAME, with the name of the workspace if only one has it. `name` is how a client
    named the model, without a workspace or with the name of one."""
    served = one.served
    named = {
        other.served.workspace for other in others if other.workspace_name == one.workspace_name
    }
    place = one.workspace_name if one.workspace_name and len(named) == 1 else served.workspace
    own = served.name if name is None else name.removeprefix(f"{served.base_name}:")
    return f"{served.base_name}:{place or NO_WORKSPACE}/{own.rpartition('/')[2]}"
