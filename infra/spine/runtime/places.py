"""Gives back the place of an effect while it only waits for an answer from elsewhere.

The places of a lane bound what a process computes at once. An effect that waits for a slow service
computes nothing. Holding its place, a few of them would keep every other run from the lane.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

GiveBack = Callable[[], AbstractContextManager[None]]

_give_back: ContextVar[GiveBack] = ContextVar("give_back", default=nullcontext)


def perform_with(give_back: GiveBack) -> None:
    """Say how the effect that this task performs gives its place back."""
    _give_back.set(give_back)


@contextmanager
def without_place() -> Iterator[None]:
    """Take no place of a lane meanwhile. Outside of an effect this does nothing."""
    with _give_back.get()():
        yield
