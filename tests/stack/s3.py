"""An S3 store on this machine, without Docker: Versity's gateway over a directory.

For tests and for `make stack`; a real installation names a store of its own. The program is built once
from its source, at the version pinned here, and kept in a cache; Go's checksum database vouches for the
source. Objects are files below the directory, so it can be thrown away with `rm`.
"""

import http.client
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.operations.local.death_signal import die_with
from infra.operations.local.free_port import free_port
from schemas.errors import InvalidConfig, TransientError
from tests.stack.go_builds import build_once, cache

VERSION = "v1.8.0"
MODULE = f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"
BUILD_S = 900.0
START_S = 30.0
HEALTH = "/headrace-health"


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running store. `process` is None where somebody else runs it."""

    endpoint: str
    access_key: str
    secret_key: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The settings with which a process reaches this store."""
        return {
            "HEADRACE_S3_ENDPOINT": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }


def binary() -> Path:
    """The store's program, built now if it is not in the cache. Raises InvalidConfig when it cannot be
    built: without Go, or without its source."""
    target = cache() / f"versitygw-{VERSION}"
    return build_once(target, _build, otherwise=f"put versitygw {VERSION} at {target}")


def _build(go: str, target: Path) -> None:
    """Build the store, and put its program at `target` in one step. Raises InvalidConfig."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = subprocess.run(
            [go, "install", MODULE],
            env={**os.environ, "GOBIN": scratch, "CGO_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
        if built.returncode:
            raise InvalidConfig(f"`go install {MODULE}` failed: {built.stderr.strip()[-500:]}")
        (Path(scratch) / "versitygw").replace(target)


@contextmanager
def s3_server(directory: Path, *, users: bool = False) -> Iterator[S3Server]:
    """A store over `directory` while inside, on a free port of 127.0.0.1, with keys of its own; with
    `users` it can be given accounts of lesser rights. It dies with this process. Raises InvalidConfig,
    TransientError."""
    process = None
    program = binary()
    access, secret = f"headrace{secrets.token_hex(6)}", secrets.token_hex(24)
    port = free_port()
    for name in ("buckets", "metadata", "users"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    arguments = [program, "--port", f"127.0.0.1:{port}", "--quiet", "--keep-alive"]
    arguments += ["--health", HEALTH, *(("--iam-dir", directory / "users") if users else ())]
    arguments += ["posix", *_metadata(directory), directory / "buckets"]
    log = directory / "server.log"
    try:
        process = _start([str(argument) for argument in arguments], access, secret, log)
        _wait_until_ready(process, port, log)
        yield S3Server(f"http://127.0.0.1:{port}", access, secret, process)
    finally:
        if process is not None:
            process.terminate()
            process.wait(10)


def _start(
    arguments: Sequence[str], access: str, secret: str, log: Path
) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            arguments,
            env={**os.environ, "ROOT_ACCESS_KEY": access, "ROOT_SECRET_KEY": secret},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )


def _metadata(directory: Path) -> tuple[str, ...]:
    """Where the store keeps an object's metadata: with the object, or apart if this disk cannot."""
    probe = directory / "buckets"
    try:
        os.setxattr(probe, "user.headrace", b"x")
    except OSError:
        return ("--sidecar", str(directory / "metadata"))
    os.removexattr(probe, "user.headrace")
    return ()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not _healthy(port):
        if process.poll() is not None or time.monotonic() > deadline:
            said = log.read_text(errors="replace")[-500:]
            raise TransientError(f"the S3 store did not start; the end of {log}:\n{said}")
        time.sleep(0.02)


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", HEALTH)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
