"""The error tree. Every error says what was wrong and what to do next.

HeadraceError
+-- Refused                what a user asked for cannot be done; carries a code and issues
|   +-- InvalidConfig      a TOML, setting or argument is wrong
|   +-- NotFound           no such run, dataset, workspace, checkpoint
|   +-- Conflict           it exists already, or under another content
+-- UserCodeError          the workspace's own code failed: data about a sample, never a crash
+-- TransientError         the outside did not answer this time; try again later
|   +-- StoreAway          the store of blobs takes nothing now: whoever works waits for it
|   +-- RepositoryAway     a git repository cannot be reached now: whoever works waits for it
+-- CorruptData            bytes do not have the hash they were promised with
+-- ReplayDiverged         a step that was run again gave other bits than the log holds
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing that is wrong: which key, what about it, and what was probably meant."""

    key: str
    message: str
    did_you_mean: str | None = None


class HeadraceError(Exception):
    """Root of all errors Headrace raises on purpose."""


class Refused(HeadraceError):
    """A request that cannot be done. `code` is stable; `message` says what to do next."""

    code = "REFUSED"
    status = 400

    def __init__(self, message: str, *, issues: tuple[Issue, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.issues = issues


class InvalidConfig(Refused):
    code = "VALIDATION"
    status = 400


class NotFound(Refused):
    code = "NOT_FOUND"
    status = 404


class Conflict(Refused):
    code = "CONFLICT"
    status = 409


class FailureCategory(StrEnum):
    """What kind of failure a sample, a grade or an effect ended with."""

    TIMEOUT = "timeout"
    VALIDATION = "validation_error"
    AGENT = "agent_error"
    GRADER = "grader_error"
    PROCESS = "process_died"
    BUDGET = "budget_exceeded"
    PROMPT_TOO_LONG = "prompt_too_long"
    INTERNAL = "internal_error"
    CRASH = "crash"
    REPLAY_DIVERGED = "replay_diverged"


class UserCodeError(HeadraceError):
    """The workspace's code failed in a way that belongs to one sample or one grade."""

    def __init__(self, category: FailureCategory, message: str) -> None:
        super().__init__(message)
        self.category = category
        self.message = message


class TransientError(HeadraceError):
    """Something outside did not answer; the same call may succeed later."""


class StoreAway(TransientError):
    """The store of blobs takes or gives nothing now (full, away, or it refuses us): no fault of the work
    that met it, which waits as long as that lasts. The message says what a person can do."""


class RepositoryAway(TransientError):
    """A git repository does not answer now: the network, the server or git on this machine failed, and
    git stated nothing about the repository itself. The work is retried after `pause_s` seconds, for as
    long as this lasts. The message says what failed."""

    def __init__(self, message: str, *, pause_s: float = 2.0) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class CorruptData(HeadraceError):
    """Bytes that do not match the hash, size or format under which they were recorded."""


class ReplayDiverged(HeadraceError):
    """A replayed learner step produced another hash than the log holds for it."""
