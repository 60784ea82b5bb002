"""Which artifacts a payload names, wherever they stand in it."""

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from schemas.events import Event, PolicyUpdated, StepSettled
from schemas.sampling import ArtifactRef

NOWHERE = ("row:", "none:")
"""Uris of references that stand for no bytes at all."""


def references(value: object) -> Iterator[ArtifactRef]:
    """Every reference in a model (an event, a manifest), in the order of its fields."""
    if isinstance(value, ArtifactRef):
        if value.uri not in NOWHERE:
            yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from references(getattr(value, name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from references(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from references(item)


def collectable(event: Event) -> frozenset[str]:
    """The uris in an event whose bytes may be gone, unless another event needs them: the learner
    collects versions that are stored for recovery alone once newer ones are, and StepSettled only says
    again which version a step made."""
    match event:
        case PolicyUpdated(pinned=False, state=state) | StepSettled(state=state):
            return frozenset(ref.uri for ref in (state.state, state.weights) if ref)
        case _:
            return frozenset()
