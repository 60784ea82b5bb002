"""Whose rows this task may see, for row-level security in the database.

The edge that serves a request sets it beside the actor. Queries filter by themselves, and this is what
still holds when one of them forgets to.
"""

from contextvars import ContextVar

VISIBLE: ContextVar[frozenset[str] | None] = ContextVar("visible", default=None)
"""The ids of the workspaces whose rows the database shows to this task; None for all rows."""
