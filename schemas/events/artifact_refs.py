"""Finds the artifacts that a payload refers to, at any depth."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from pydantic import BaseModel

from schemas.artifact_refs import ArtifactRef
from schemas.events import Event, PolicyUpdated, StepSettled
from schemas.sampling import PolicyRef

T = TypeVar("T")

NOWHERE = ("row:", "none:")
"""How the uris of references without any bytes begin."""


def references(value: object) -> Iterator[ArtifactRef]:
    """Every reference in a model (an event, a manifest), in the order of its fields."""
    return (ref for ref in _within(value, ArtifactRef) if ref.uri not in NOWHERE)


def collectable(event: Event) -> frozenset[str]:
    """The uris in an event whose bytes may be deleted unless another event needs them. The learner
    deletes versions that no checkpoint or validation needs once newer versions exist. StepSettled
    only repeats which version a step made, and a request repeats which version it sampled with."""
    sampled = [policy.weights for policy in _within(event, PolicyRef)]
    match event:
        case PolicyUpdated(pinned=False, state=state) | StepSettled(state=state):
            spare = [state.state, state.weights, *sampled]
        case _:
            spare = [*sampled]
    return frozenset(ref.uri for ref in spare if ref)


def _within(value: object, kind: type[T]) -> Iterator[T]:
    """Every value of type `kind` in a model, in the order of its fields. The content of such a value is
    not searched."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _within(getattr(value, name), kind)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _within(item, kind)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _within(item, kind)
