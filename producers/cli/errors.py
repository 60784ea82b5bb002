"""What a command may fail with. Every failure has a stable code, a message that says what to do
next, and issues that name keys; how it is printed is decided in one place (`producers/cli/main.py`).
"""

from schemas.errors import Issue, Refused


class Failure(Refused):
    """A command cannot do what was asked, under a code of its own (often the server's)."""

    def __init__(self, code: str, message: str, *, issues: tuple[Issue, ...] = ()) -> None:
        super().__init__(message, issues=issues)
        self.code = code


class Interrupted(Exception):
    """SIGINT came while a command watched something that goes on without it. `come_back` is the
    command to watch it again; None when there is nothing to come back to."""

    def __init__(self, message: str, come_back: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.come_back = come_back
