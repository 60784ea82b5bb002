"""Whose rows this task may see, for row-level security in the database.

The edge that serves a request sets it beside the actor. Queries filter by themselves, and this is what
still holds when one of them forgets to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

VISIBLE: ContextVar[frozenset[str] | None] = ContextVar("visible", default=None)
"""The ids of the workspaces whose rows the database shows to this task; None for all rows."""


@contextmanager
def all_rows() -> Iterator[None]:
    """Let the block see the rows of all workspaces, for a decision that others' rows are part of. The
    caller shows none of them to the sender."""
    token = VISIBLE.set(None)
    try:
        yield
    finally:
        VISIBLE.reset(token)
