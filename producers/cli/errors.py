"""The exceptions of the commands. Every failure has a stable code, a message that says what to do next,
and issues that name keys. Only `producers/cli/main.py` decides how a failure is printed.
"""

from schemas.errors import Issue, Refused


class Failure(Refused):
    """A command failed. It carries its own code, which is often the server's."""

    def __init__(self, code: str, message: str, *, issues: tuple[Issue, ...] = ()) -> None:
        super().__init__(message, issues=issues)
        self.code = code


class Interrupted(Exception):
    """SIGINT arrived while a command watched something that continues without it. `resume_command`
    watches it again; None when there is nothing left to watch."""

    def __init__(self, message: str, resume_command: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.resume_command = resume_command
