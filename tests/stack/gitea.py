"""A Gitea on this machine, without Docker: a real forge for the tests.

The program is built once from its Go module, at the version pinned here, and kept in a cache (`make
gitea`). The server keeps everything in one temporary directory. It answers on 127.0.0.1, over HTTPS
with a certificate that signs itself. It never runs as root. If we are root, it is started as the system
user `headrace`, which owns its directory.
"""

import http.client
import json
import os
import pwd
import secrets
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from infra.operations.local.death_signal import die_with
from infra.operations.local.embedded_postgres import SYSTEM_USER, ensure_user
from infra.operations.local.free_port import free_port
from schemas.errors import InvalidConfig, TransientError
from tests.stack.certificate import make_certificate
from tests.stack.go_builds import build_once, cache

VERSION = "v1.25.0"
MODULE = f"code.gitea.io/gitea@{VERSION}"
TAGS = "sqlite sqlite_unlock_notify"
RESOURCES = ("options", "templates", "public")
"""Folders of the source that the running program reads. No assets are built, so pages look bare."""
BUILD_S = 3600.0
START_S = 60.0
STOP_S = 20.0
ADMIN = "headrace"

INI = """
APP_NAME = headrace
RUN_MODE = prod
RUN_USER = {user}
WORK_PATH = {directory}

[server]
PROTOCOL = https
CERT_FILE = {certificate}
KEY_FILE = {private_key}
HTTP_ADDR = 127.0.0.1
HTTP_PORT = {port}
DOMAIN = 127.0.0.1
ROOT_URL = {url}/
DISABLE_SSH = true
OFFLINE_MODE = true
STATIC_ROOT_PATH = {resources}
APP_DATA_PATH = {directory}/data

[database]
DB_TYPE = sqlite3
PATH = {directory}/gitea.db
SQLITE_JOURNAL_MODE = WAL

[security]
INSTALL_LOCK = true
SECRET_KEY = {key}
PASSWORD_HASH_ALGO = pbkdf2_v1

[repository]
ROOT = {directory}/repositories

[webhook]
ALLOWED_HOST_LIST = *

[service]
DISABLE_REGISTRATION = true

[indexer]
ISSUE_INDEXER_TYPE = db

[oauth2]
ENABLED = false

[session]
PROVIDER = memory

[log]
MODE = console
LEVEL = Warn
"""


def program() -> Path:
    """The folder in the cache that holds the program `gitea` and its resources, built now if it is not
    there. Raises InvalidConfig when it cannot be built."""
    target = cache() / f"gitea-{VERSION}"
    parts = f"gitea {VERSION} and the folders {', '.join(RESOURCES)} of its source"
    return build_once(target, _build, otherwise=f"put {parts} at {target}")


def _build(go: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        told = _run([go, "mod", "download", "-json", MODULE], Path(scratch))
        source, made = Path(scratch) / "source", Path(scratch) / "made"
        shutil.copytree(json.loads(told)["Dir"], source)
        for path in (source, *source.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)
        # `go install` refuses a module that has `replace` lines, as this one does.
        build = ["build", "-tags", TAGS, "-ldflags", "-s -w", "-o", str(made / "gitea"), "."]
        _run(["nice", "-n", "10", go, *build], source)
        for name in RESOURCES:
            shutil.copytree(source / name, made / name)
        # In one step: a reader sees nothing or all of it.
        made.rename(target)


def _run(command: Sequence[str], directory: Path) -> str:
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-800:]
        raise InvalidConfig(f"Gitea {VERSION} cannot be built; `{' '.join(command)}` says: {said}")
    return done.stdout


class GiteaServer:
    """One server in a directory of its own. `url` stays the same over its lives. Its administrator is
    ADMIN with `password`. A client must trust the certificate in `files`."""

    def __init__(self, directory: Path) -> None:
        """Raises InvalidConfig when the program cannot be had."""
        self._directory = directory
        self._program = _place(program(), directory)
        self._user = SYSTEM_USER if os.geteuid() == 0 else None
        self._port = free_port()
        self.url = f"https://127.0.0.1:{self._port}"
        self.files = make_certificate(directory)
        self.password = secrets.token_urlsafe(16)
        self._process: subprocess.Popen[bytes] | None = None
        # The kernel ends a child that is to die with us when the *thread* that made it ends.
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="gitea")
        self._prepare()

    @property
    def log(self) -> Path:
        return self._directory / "gitea.log"

    def start(self) -> None:
        """Start it and wait until it answers. Raises TransientError when it does not."""
        self._process = self._launcher.submit(self._launch).result()
        deadline = time.monotonic() + START_S
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                said = self.log.read_text(errors="replace")[-800:]
                raise TransientError(f"Gitea did not start; the end of {self.log}:\n{said}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop it in order."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def user_id(self) -> int:
        """The user that the running server runs as."""
        assert self._process is not None, "Gitea does not run"
        return Path(f"/proc/{self._process.pid}").stat().st_uid

    def make_admin(self) -> None:
        """Create the administrator. The server must have started once, because that makes the tables."""
        given = [
            "--username",
            ADMIN,
            "--password",
            self.password,
            "--email",
            f"{ADMIN}@example.org",
        ]
        flags = ["--admin", "--must-change-password=false"]
        done = subprocess.run(
            self._command("admin", "user", "create", *given, *flags),
            cwd=self._directory,
            env=self._environment,
            user=self._user,
            group=_group(self._user),
            extra_groups=None if self._user is None else (),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise TransientError(f"Gitea makes no administrator: {done.stderr[-800:]}")

    def _launch(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as output:
            return subprocess.Popen(
                self._command("web"),
                cwd=self._directory,
                env=self._environment,
                user=self._user,
                group=_group(self._user),
                extra_groups=None if self._user is None else (),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )

    def _command(self, *arguments: str) -> list[str]:
        return [str(self._program / "gitea"), "--config", str(self._configuration), *arguments]

    @property
    def _configuration(self) -> Path:
        return self._directory / "app.ini"

    @property
    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self._directory), "LC_ALL": "C"}

    def _is_healthy(self) -> bool:
        trusted = ssl.create_default_context(cafile=self.files.certificate)
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self._port, timeout=5, context=trusted
        )
        try:
            connection.request("GET", "/api/healthz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _prepare(self) -> None:
        user = self._user or pwd.getpwuid(os.geteuid()).pw_name
        if self._user is not None:
            ensure_user(self._user)
        text = INI.format(
            user=user,
            directory=self._directory,
            port=self._port,
            url=self.url,
            resources=self._program,
            key=secrets.token_hex(32),
            certificate=self.files.certificate,
            private_key=self.files.key,
        )
        self._configuration.touch(mode=0o600)
        self._configuration.write_text(text)
        if self._user is not None:
            for path in (self._directory, self._configuration, self.files.key):
                shutil.chown(path, self._user, self._user)


def _place(found: Path, directory: Path) -> Path:
    """Where the server runs the program from. As root that is a copy in the server's own directory,
    because the user that it runs as may not be able to reach our cache."""
    if os.geteuid() != 0:
        return found
    return shutil.copytree(found, directory / "program")


def _group(user: str | None) -> int | None:
    return pwd.getpwnam(user).pw_gid if user else None


@contextmanager
def gitea_server() -> Iterator[GiteaServer]:
    """A running server in a temporary directory, gone afterwards. It dies with this process. Raises
    InvalidConfig when it cannot be had, TransientError when it does not start."""
    directory = Path(tempfile.mkdtemp(prefix="headrace-gitea-"))
    try:
        server = GiteaServer(directory)
        try:
            server.start()
            server.make_admin()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    """Build the program into the cache, for `make gitea`."""
    try:
        sys.stdout.write(f"Gitea {VERSION} is in {program()}\n")
    except InvalidConfig as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
