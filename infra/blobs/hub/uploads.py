"""Uploads directories to a model hub, through the hub's own client in a process of its own.

The client blocks and keeps global state, so it does not run in a worker's process. The process gets the
token through its standard input, dials checked addresses only, and ends when its worker dies.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from urllib.parse import urlsplit

from infra.ports.hub import HubCommit, PreparedUpload
from schemas.errors import HubAway, InvalidConfig, Refused, TransientError
from schemas.secrets.secret_value import SecretValue
from schemas.text import plain

WALL_S = 5 * 3600.0
"""The longest that one attempt may take. The files that were uploaded meanwhile stay on the hub."""
AWAY_S = 15.0
"""About how long an upload waits at first before it asks the hub again, unless the hub names a pause."""
LONGEST_PAUSE_S = 900.0
PASSED_ON = ("PATH", "LANG", "SSL_CERT_FILE", "SSL_CERT_DIR", "TMPDIR")
SCRIPT = "infra.blobs.hub.upload_program"


class HubUploads:
    """A hub at an address, which is a setting of the operator (HF_ENDPOINT)."""

    def __init__(self, endpoint: str, *, away_s: float = AWAY_S) -> None:
        self._endpoint = endpoint
        self._away_s = away_s

    async def upload(self, wanted: PreparedUpload, token: SecretValue) -> HubCommit:
        """Make the commit, or find the one that was made before. Raises Refused with the hub's words
        when the hub does not accept it, HubAway when the hub does not answer or asks to wait, and
        TransientError when the client fails."""
        check_endpoint(self._endpoint)
        request = {
            "endpoint": self._endpoint,
            "token": token.reveal(),
            "id": wanted.id,
            "directory": str(wanted.directory),
            "repository": wanted.repository,
            "private": wanted.private,
            "title": wanted.title,
        }
        with tempfile.TemporaryDirectory(prefix="headrace-hub-") as home:
            said = await _run(request, home)
        return self._answer(said, token)

    def _answer(self, said: bytes, token: SecretValue) -> HubCommit:
        """The commit in the program's last line. Raises Refused, HubAway and TransientError."""
        try:
            answer = json.loads(said.strip().rpartition(b"\n")[2])
        except ValueError:
            answer = {}
        if answer.get("revision"):
            return HubCommit(url=str(answer["url"]), revision=str(answer["revision"]))
        words = str(answer.get("error") or "the upload ended without an answer")
        message = plain(words.replace(token.reveal(), "***"))
        if answer.get("kind") == "refused":
            raise Refused(message)
        if answer.get("kind") != "away":
            raise TransientError(f"{message}; it is tried again")
        message = f"{message}; it is asked again until it answers"
        if answer.get("pause_s"):
            # Twice, because half of a pause may be waited.
            raise HubAway(message, pause_s=2 * min(float(answer["pause_s"]), LONGEST_PAUSE_S))
        raise HubAway(message, pause_s=self._away_s, longest_pause_s=LONGEST_PAUSE_S)


def check_endpoint(endpoint: str) -> None:
    """Raise InvalidConfig unless this is the address of a hub that a token may be sent to."""
    parts = urlsplit(endpoint)
    is_local = parts.hostname in ("127.0.0.1", "localhost", "::1")
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and is_local)
    if is_safe and parts.hostname and not parts.username and not parts.query:
        return
    shown = endpoint.rpartition("@")[2][:120]
    raise InvalidConfig(
        f"HF_ENDPOINT holds {shown!r}, where no token is sent; set it to https://HOST, or to "
        "http:// with a hub on this machine"
    )


async def _run(request: Mapping[str, object], home: str) -> bytes:
    """Run the program, and return what it printed. The program ends when its input does."""
    env_vars = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        SCRIPT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={
            **env_vars,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HF_HOME": home,
            "HF_ENDPOINT": str(request["endpoint"]),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        },
    )
    assert child.stdin is not None  # noqa: S101 - it is a pipe
    assert child.stdout is not None  # noqa: S101 - it is a pipe
    try:
        async with asyncio.timeout(WALL_S):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                child.stdin.write(json.dumps(request).encode() + b"\n")
                await child.stdin.drain()
            said = await child.stdout.read()
            await child.wait()
            return said
    except TimeoutError:
        return b""
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        child.stdin.close()
