"""The home of a platform on one machine: a private directory with an API key, a lock and a state
file.

Only one supervisor at a time owns a home. It holds an exclusive file lock, which the kernel
releases when the supervisor ends. Only the user that owns a home can read what is in it.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from schemas.errors import Conflict, InvalidConfig

STATE = "supervisor.json"
LOCK = "supervisor.lock"


@dataclass(frozen=True, slots=True)
class ChildState:
    """A supervised process, as `headrace status` shows it."""

    name: str
    pid: int | None
    worker: str
    starts: int
    log: str
    note: str = ""

    @property
    def restarts(self) -> int:
        """How often the process was restarted. It is 0 also before the first start."""
        return max(0, self.starts - 1)


@dataclass(frozen=True, slots=True)
class SupervisorState:
    """The processes under a home's supervisor. `postgres_pid` is None when the user provides the
    database."""

    pid: int
    url: str
    ready: bool
    started_at: str
    postgres_pid: int | None = None
    children: tuple[ChildState, ...] = field(default=())


def prepare(home: Path) -> None:
    """Create the home and its API key, both private. Raises InvalidConfig when we cannot use it."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.chmod(0o700)
        (home / "logs").mkdir(mode=0o700, exist_ok=True)
        _make_api_key(home / "token")
    except OSError as error:
        raise InvalidConfig(
            f"HEADRACE_HOME {home} cannot be used ({error.strerror}); set it to a directory of your own"
        ) from error


def _make_api_key(path: Path) -> None:
    if path.exists():
        path.chmod(0o600)
        return
    scratch = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(scratch, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"hr_{secrets.token_urlsafe(32)}\n")
    scratch.rename(path)


@contextmanager
def own(home: Path) -> Iterator[None]:
    """Own the home inside the block. Raises Conflict, which names the owner's pid, when another process
    owns it."""
    descriptor = os.open(home / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        if not _lock(descriptor):
            raise _conflict_of(home, os.pread(descriptor, 32, 0).decode().strip())
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        (home / STATE).unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)


def refuse_owned(home: Path) -> None:
    """Raise Conflict, which names the owner's pid, when the home has an owner."""
    if (pid := owner(home)) is not None:
        raise _conflict_of(home, str(pid))


def _conflict_of(home: Path, pid: str) -> Conflict:
    return Conflict(
        f"a supervisor (pid {pid or 'unknown'}) already runs on {home}; stop it with `headrace down`, "
        "or set HEADRACE_HOME to another directory"
    )


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def owner(home: Path) -> int | None:
    """The pid of the supervisor that owns the home now; None if the home has no owner."""
    path = home / LOCK
    if not path.exists():
        return None
    with path.open() as file:
        if _lock(file.fileno()):
            return None
        text = file.read().strip()
    return int(text) if text.isdigit() else None


def write_state(home: Path, state: SupervisorState) -> None:
    """Replace the state file atomically."""
    scratch = home / f"{STATE}.{os.getpid()}"
    scratch.write_text(json.dumps(asdict(state), indent=2) + "\n")
    scratch.chmod(0o600)
    scratch.rename(home / STATE)


def read_state(home: Path) -> SupervisorState | None:
    """The state of the supervisor that owns the home now; None if the home has no owner or the owner has
    not written its state yet."""
    pid = owner(home)
    path = home / STATE
    if pid is None or not path.exists():
        return None
    document: Mapping[str, object] = json.loads(path.read_text())
    if document.get("pid") != pid:
        return None
    children = document.get("children")
    listed = children if isinstance(children, list) else []
    postgres = document.get("postgres_pid")
    return SupervisorState(
        pid=pid,
        url=str(document.get("url")),
        ready=bool(document.get("ready")),
        started_at=str(document.get("started_at")),
        postgres_pid=postgres if isinstance(postgres, int) else None,
        children=tuple(ChildState(**child) for child in listed),
    )
