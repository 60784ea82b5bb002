"""On whose behalf this task appends events. Each of them keeps it (`Recorded.actor`)."""

from contextvars import ContextVar

APPENDER: ContextVar[str | None] = ContextVar("appender", default=None)
"""A name to show and to search for, which the edge that serves a request sets; None for a consumer."""
