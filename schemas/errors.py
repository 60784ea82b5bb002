"""The tree of errors. Every error says what is wrong and what to do next.

HeadraceError
+-- Refused                a request cannot be carried out; has a code and issues
|   +-- InvalidConfig      a TOML, setting or argument is wrong
|   +-- NotFound           there is no such run, dataset, workspace or checkpoint
|   +-- Conflict           it contradicts what exists already, such as a name that is in use
|   +-- QuotaExceeded      a workspace or an API key has used what it may use; it frees later
+-- UserCodeError          the workspace's own code failed; recorded with its sample, never a crash
+-- TransientError         something outside of Headrace did not answer; the call may succeed later
|   +-- StoreAway          the blob store cannot be used now; work waits for it
|   +-- JudgeAway          the model that scores answers does not answer now; work waits for it
|   +-- TeacherAway        the server of a teacher does not answer now; work waits for it
|   +-- SamplerBusy        servers that sample have weights of others now; work waits for them
|   +-- SandboxAway        the service that runs user code cannot be reached; work waits for it
|   +-- RepositoryAway     a git repository cannot be reached now; work waits for it
|       +-- ForgeAway      the API of a forge does not answer now; work waits for it
|       +-- HubAway        a model hub does not answer now; work waits for it
+-- CorruptData            bytes do not have the hash under which they were recorded
+-- ReplayDiverged         a replayed step gave other bits than the log holds
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Issue:
    """One thing that is wrong: which key, what is wrong with it, and a suggestion."""

    key: str
    message: str
    did_you_mean: str | None = None


class HeadraceError(Exception):
    """Root of all errors that Headrace raises on purpose."""


class Refused(HeadraceError):
    """A request that cannot be carried out. `code` is stable, and `message` says what to do next."""

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


class QuotaExceeded(Refused):
    """A workspace or an API key has used what it may use. After `retry_s` seconds it may ask again."""

    code = "QUOTA_EXCEEDED"
    status = 429

    def __init__(self, message: str, *, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class FailureCategory(StrEnum):
    """The kind of failure that a sample, a grade or an effect ended with."""

    TIMEOUT = "timeout"
    VALIDATION = "validation_error"
    AGENT = "agent_error"
    GRADER = "grader_error"
    PROCESS = "process_died"
    BUDGET = "budget_exceeded"
    PROVIDER = "provider_error"
    PROMPT_TOO_LONG = "prompt_too_long"
    INTERNAL = "internal_error"
    CRASH = "crash"
    REPLAY_DIVERGED = "replay_diverged"


POLICY_FAILURES = frozenset(
    {FailureCategory.AGENT, FailureCategory.TIMEOUT, FailureCategory.PROMPT_TOO_LONG}
)
"""How a sample fails because of what the policy wrote: its workflow raised (also at a limit of turns),
took too long, or made a prompt that is too long. Such an attempt is a bad answer, and figures count it.
All other failures are those of the platform, of the grader or of a judge."""

FAILED_REWARD = 0.0
"""The reward with which figures count an attempt of POLICY_FAILURES. It never passes."""


class UserCodeError(HeadraceError):
    """The workspace's code failed in a way that concerns one sample or one grade."""

    def __init__(self, category: FailureCategory, message: str) -> None:
        super().__init__(message)
        self.category = category
        self.message = message


class TransientError(HeadraceError):
    """Something outside of Headrace did not answer. The same call may succeed later."""


class StoreAway(TransientError):
    """The blob store cannot be used now (it is full, unreachable, or refuses access). This is not a
    fault of the work that met it. The work waits until the store can be used again. The message
    says what a person can do."""


class SandboxAway(TransientError):
    """The service that runs user code cannot be reached or cannot confine it now. This is not a fault of
    the work that needs it. The work waits until the service is back."""


class CallInterrupted(TransientError):
    """The process of a call of user code ended during the call. Made again, the call runs alone, which
    shows whether it ends its process. Who made it makes it again at once, because only the sandbox that
    it was made in knows how often that happened."""


class JudgeAway(TransientError):
    """A judge cannot be reached, is overloaded or limits the rate. This is not a fault of the answers
    that it should score. The work waits and asks again, for as long as this lasts."""


class TeacherAway(TransientError):
    """The server of a teacher cannot be reached, is overloaded or limits the rate. This is not a fault
    of the samples that it should read. The work waits and asks again, for as long as this lasts. The
    message says what failed."""


class SamplerBusy(TransientError):
    """The servers that sample compute with other weights now, which another worker replaces. This is not
    a fault of the work that needs them. It waits until it has its turn, for as long as this lasts."""


class RepositoryAway(TransientError):
    """A git repository cannot be reached: the network, the server or git on this machine failed, and
    git reported nothing about the repository itself. The work is retried after `pause_s` seconds,
    for as long as this lasts. With `longest_pause_s` each pause is twice the one before, up to that
    one. The message says what failed."""

    def __init__(
        self, message: str, *, pause_s: float = 2.0, longest_pause_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.pause_s = pause_s
        self.longest_pause_s = longest_pause_s


class ForgeAway(RepositoryAway):
    """The API of a forge (GitHub, Gitea, GitLab) cannot be reached, or asks to wait. The work is retried
    after `pause_s` seconds, for as long as this lasts."""


class HubAway(RepositoryAway):
    """A model hub cannot be reached, or asks to wait. The upload is continued after a pause, for as long
    as this lasts."""


class CorruptData(HeadraceError):
    """Bytes that do not match the hash, size or format under which they were recorded."""


class ReplayDiverged(HeadraceError):
    """A learner step that was replayed gave another hash than the log holds for it."""
