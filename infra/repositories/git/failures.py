"""Classifies failures of git: a fact about the repository, or a host that cannot be reached now.

Only what git itself states about the repository or the ref is final. Every other failure is retried for
as long as it lasts: a process that was killed, a time-out, a name that does not resolve, a broken
connection, a server that answers 5xx or 429, a full disk, and any text that this module does not know.
For a directory of this machine, which has no server, an unknown text is a failed attempt.
A user can stop a run that waits in vain, but nobody can continue a run that was ended by mistake.
"""

import re
import signal

from infra.repositories.git.process import CPU_S, GitFailed, GitTooLong
from infra.repositories.git.storage import too_large
from schemas.errors import HeadraceError, NotFound, Refused, RepositoryAway, TransientError

ABSENT = re.compile(
    r"returned error: (5\d\d|429|408)|Could not resolve host|Temporary failure in name resolution"
    r"|Connection (refused|reset|timed out|closed)|Failed to connect|Operation (too slow|timed out)"
    r"|No space left on device|Resource temporarily unavailable|Cannot allocate memory"
    r"|Input/output error|Stale file handle|^bwrap: |: git: not found",
    re.MULTILINE,
)
"""Messages that mean the repository cannot be reached now. They take precedence over all others."""

LOGIN = (
    "the server needs a login, or this login may not read it: give a token or a deploy key to "
    "`headrace workspace connect`"
)
MISSING = "correct the address; a private repository is shown to those only who may read it"

STATED: tuple[tuple[str, str], ...] = (
    (
        r"does not appear to be a git repository",
        "is not a git repository: name its top directory, or make one there with `git init`, "
        "`git add --all` and `git commit`",
    ),
    (
        r"not a git repository: [^'\s]|invalid gitfile format|no path in gitfile"
        r"|too large to be a \.git file",
        "has a file .git that does not lead to a repository: mend it, or give another directory",
    ),
    (r"repository '.*' not found|returned error: (404|410)", f"is not there: {MISSING}"),
    (
        r"[Rr]epository not found|repository not exported|could not be found or you don't have",
        f"is not there: {MISSING}",
    ),
    (r"Authentication failed for|could not read (Username|Password) for", LOGIN),
    (r"returned error: (401|403)|Permission denied \(|Permission denied, please try again", LOGIN),
    (r"Host key verification failed", "its host key is not known: add it to ~/.ssh/known_hosts"),
    (r"couldn't find remote ref|Remote branch .* not found", "has no such branch"),
    (r"not our ref", "does not give out that commit: push it, or correct commit_sha"),
    (r"detected dubious ownership", "belongs to another user: change its owner"),
    (r"transport '.*' not allowed", "is reached by a protocol that is not allowed"),
    (r"dumb http transport does not support", "is served by a server without git's own protocol"),
    (
        r"returned error: 30\d",
        "has moved, or its server sends git elsewhere: connect it by its present address",
    ),
    (
        r"trying to write non-commit object",
        "has a branch that does not lead to a commit: name another branch, or mend it there",
    ),
    (r"fsck error|fsckObjects|in fsck", "holds broken objects: `git fsck` there says which"),
)
"""Patterns of git's messages (LC_ALL=C), and what to tell the user. Git quotes the path of a mirror that
is not a repository, and not the path that a file .git names."""

WORKED = f"git worked on it for more than {CPU_S} s; make the commit smaller"

BROKEN = re.compile(
    r"fetch-pack: invalid index-pack output|index-pack failed|[Oo]ut of memory, \w+ failed"
    r"|possible repository corruption on the remote side|bad pack header|expected flush after"
    r"|expected '[\w-]+', received"
)
CUT_OFF = re.compile(r"early EOF|hung up|RPC failed|curl \d+|died of signal (9|15)\b")
"""Git's messages for a transfer that it cannot read or hold in memory, and for a broken connection."""

CONSEQUENCES = (
    "fatal: Could not read from remote repository",
    "fatal: the remote end hung up",
)
"""Messages that follow the one that says why."""

LONGEST = 300
"""How many characters of git's error text a message quotes."""

CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals of a fault in git itself. The repository's content may be the cause, so such an attempt counts
towards the limit of retries."""


def error_for(failed: GitFailed, *, what: str, is_here: bool = False) -> HeadraceError:
    """The error to raise for this failure. `what` is the repository's address, and `is_here` means that
    it is a directory of this machine. Returns Refused or NotFound if git stated something final,
    RepositoryAway if the same command may succeed later, and TransientError (retried a few times) if git
    crashed, or got what it cannot use."""
    said = _last_line(failed.stderr)
    ended_by = _signal(failed)
    if isinstance(failed, GitTooLong):
        return Refused(f"{what}: {failed.stderr}; delete branches and tags there")
    if ended_by is signal.SIGXCPU:
        return Refused(f"{what}: {WORKED}")
    if ended_by is signal.SIGXFSZ:
        return Refused(f"{what}: {too_large(failed.most_bytes)}")
    if ended_by in CRASHES:
        return TransientError(f"git crashed on {what} ({ended_by.name})")
    if failed.status < 0 or ABSENT.search(failed.stderr):
        return _unreachable(what, said or f"git was ended by signal {-failed.status}")
    if "File too large" in failed.stderr:
        return Refused(f"{what}: {too_large(failed.most_bytes)}")
    for pattern, means in STATED:
        if found := re.search(f"(?m)^.*({pattern}).*$", failed.stderr):
            return NotFound(f"{what} {means} ({found[0].strip()[:LONGEST]})")
    if is_here or (BROKEN.search(failed.stderr) and not CUT_OFF.search(failed.stderr)):
        return TransientError(f"git cannot use what {what} sends ({said})")
    return _unreachable(what, said)


def _unreachable(what: str, said: str) -> RepositoryAway:
    return RepositoryAway(
        f"the git repository {what} does not answer now ({said}); retrying until it does"
    )


def _signal(failed: GitFailed) -> signal.Signals | None:
    """The signal that ended git, or the child of git whose end made it give up."""
    named = re.search(r"died of signal (\d+)", failed.stderr)
    number = -failed.status if failed.status < 0 else int(named[1]) if named else 0
    try:
        return signal.Signals(number)
    except ValueError:
        return None


def _last_line(said: str) -> str:
    """The most useful line of git's error text: the last one that git marks as fatal or an error and
    that is not the consequence of another, else the last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    loud = [line for line in lines if line.startswith(("fatal:", "error:", "ERROR:", "remote: "))]
    telling = [line for line in loud if not line.startswith(CONSEQUENCES)]
    return (telling or loud or lines or [""])[-1][:LONGEST]
