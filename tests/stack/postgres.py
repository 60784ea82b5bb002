"""A PostgreSQL server of our own: Debian's programs, a directory, a free port, a password.

For tests and for the stack without Docker. The server never runs as root: as root it is started as the
system user `headrace`, in a directory that is given to that user. It answers on 127.0.0.1 only and asks
for the password in `url`.
"""

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from infra.operations.local.embedded_postgres import SYSTEM_USER, ensure_user
from infra.operations.local.free_port import free_port
from schemas.errors import InvalidConfig, TransientError

StopMode = Literal["smart", "fast", "immediate"]

START_S = 60
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "shared_buffers": "64MB",
    "max_connections": "200",
    "log_min_messages": "warning",
}
KEY_FILE = "superuser"
"""The file beside the data that holds the superuser's password."""


def binaries() -> Path | None:
    """The directory of the newest installed server's programs; None when there is none."""
    found = Path("/usr/lib/postgresql").glob("*/bin/pg_ctl")
    newest = max(found, key=lambda path: int(path.parts[-3]), default=None)
    if newest is not None:
        return newest.parent
    program = shutil.which("pg_ctl")
    return Path(program).resolve().parent if program else None


def install() -> Path | None:
    """The programs' directory; as root on Debian the package is installed when it is missing."""
    if (found := binaries()) is not None:
        return found
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return None
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (("update", "-qq"), ("install", "-y", "-qq", "postgresql")):
        subprocess.run(
            ["apt-get", *arguments], env=environment, check=False, stdout=subprocess.DEVNULL
        )
    return binaries()


class PostgresServer:
    """One server. It outlives the process that starts it: `stop` it."""

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        data: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`directory` holds everything; `data` puts the database itself elsewhere (another disk).
        Raises InvalidConfig when the server's programs are not installed."""
        found = binaries()
        if found is None:
            raise InvalidConfig("there is no PostgreSQL server here; apt-get install postgresql")
        self.binaries = found
        self.directory = directory
        self.data = data or directory / "data"
        self.port = port or free_port()
        self._settings = {**SETTINGS, **(settings or {})}
        self._user = SYSTEM_USER if os.geteuid() == 0 else None

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        """The URL of one of its databases, as the superuser."""
        password = (self.directory / KEY_FILE).read_text().strip()
        return f"postgresql://postgres:{password}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start, making the database first if there is none; returns once it answers. Raises
        TransientError when it does not."""
        self._prepare()
        if not (self.data / "PG_VERSION").exists():
            self._initdb()
        given = {**self._settings, "port": self.port, "unix_socket_directories": ""}
        options = " ".join(f"-c {key}='{value}'" for key, value in given.items())
        self._run(
            "pg_ctl",
            *("-D", str(self.data), "-l", str(self.log), "-t", str(START_S), "-o", options),
            *("-w", "start"),
        )

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop; `immediate` is a crash, and the next start recovers from it."""
        if self.running:
            self._run("pg_ctl", "-D", str(self.data), "-m", mode, "-w", "stop")

    @property
    def running(self) -> bool:
        """Whether its postmaster lives."""
        if not (self.data / "postmaster.pid").exists():
            return False
        return self._call("pg_ctl", "-D", str(self.data), "status").returncode == 0

    @property
    def log(self) -> Path:
        return self.directory / "postgres.log"

    def _prepare(self) -> None:
        for directory in (self.directory, self.data):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._user is None:
            return
        ensure_user(self._user)
        entry = pwd.getpwnam(self._user)
        for directory in (self.directory, self.data):
            os.chown(directory, entry.pw_uid, entry.pw_gid)
            directory.chmod(0o700)

    def _initdb(self) -> None:
        password = self.directory / KEY_FILE
        password.write_text(secrets.token_urlsafe(24) + "\n")
        password.chmod(0o600)
        if self._user is not None:
            shutil.chown(password, self._user, self._user)
        self._run(
            "initdb",
            *("--auth=scram-sha-256", f"--pwfile={password}", "-U", "postgres"),
            *("--encoding=utf8", "--locale=C", "--no-sync", "-D", str(self.data)),
        )

    def _run(self, program: str, *arguments: str) -> None:
        done = self._call(program, *arguments)
        if done.returncode:
            log = self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""
            said = done.stderr.decode(errors="replace")[-1000:]
            raise TransientError(f"{program} on {self.data} failed: {said}\n{log}")

    def _call(self, program: str, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
        return _as_user(self._user, [str(self.binaries / program), *arguments], self.directory)


def _as_user(
    user: str | None, command: Sequence[str], directory: Path
) -> "subprocess.CompletedProcess[bytes]":
    """Run a program as `user` (None: as we are). Its output goes to files: a server that it leaves
    behind would hold a pipe open permanently."""
    with tempfile.TemporaryFile() as errors:
        done = subprocess.run(
            command,
            cwd=directory,
            user=user,
            group=pwd.getpwnam(user).pw_gid if user else None,
            extra_groups=() if user else None,
            env={"PATH": os.defpath, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            check=False,
        )
        errors.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, b"", errors.read())


@contextmanager
def postgres_server(
    *, data: Path | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[PostgresServer]:
    """A running server in a temporary directory, gone afterwards. Raises InvalidConfig when there are
    no programs to run, TransientError when they do not."""
    directory = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
    try:
        server = PostgresServer(directory, data=data, settings=settings)
        try:
            server.start()
            yield server
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
