"""Gives git the credential of a private repository.

A secret reaches git through the environment only. A token is given by a credential helper that git asks
for one host alone, so a redirect to another host does not get it. A deploy key is a file of our user in
a private directory, which is removed when the command has ended.
"""

import base64
import contextlib
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from infra.repositories.git.credentials import GitCredential, KeyCredential, TokenCredential
from schemas.errors import InvalidConfig

LONGEST_TOKEN = 4096
LONGEST_KEY = 64 << 10

KEYS = "key-"
"""The beginning of the names of directories that hold a deploy key."""

LEFT_OVER_S = 3600.0
"""The age at which a key that a killed process left is removed. No command of git takes this long."""

HELPER = (
    '!f() { test "$1" = get && printf "username=%s\\npassword=%s\\n" '
    '"$HEADRACE_GIT_USERNAME" "$HEADRACE_GIT_TOKEN"; }; f'
)
"""A credential helper that answers with two variables of its environment."""


@dataclass(frozen=True, slots=True)
class GitLogin:
    """How a git command logs in: variables of its environment, options of its ssh with the files that
    they name, and the texts that no message may quote."""

    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    ssh: str = ""
    files: tuple[Path, ...] = ()
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def redact(self, text: str) -> str:
        """Return the text without the secrets. A server may echo what it was sent."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


NO_LOGIN = GitLogin()


@contextlib.contextmanager
def logging_in(url: str, credential: GitCredential | None, *, folder: Path) -> Iterator[GitLogin]:
    """Make a credential usable for commands that reach `url`, until the block ends. `folder` holds the
    private directory of a key."""
    match credential:
        case TokenCredential():
            yield _token_login(url, credential)
        case KeyCredential():
            with _key_file(credential, folder) as file:
                agent = "-oIdentitiesOnly=yes -oIdentityAgent=none"
                yield GitLogin(ssh=f"-i {shlex.quote(str(file))} {agent}", files=(file.parent,))
        case None:
            yield NO_LOGIN


def _token_login(url: str, credential: TokenCredential) -> GitLogin:
    """The login by a token, for the scheme, host and port of `url` alone. Other sources get nothing."""
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http"):
        return NO_LOGIN
    username, token = credential.username, credential.token
    if not all(_is_sendable(text) for text in (username, token)):
        raise InvalidConfig(
            "the token or its user name is empty, too long, or has characters that tokens do not have; "
            "give the token as the forge shows it"
        )
    basic = base64.b64encode(f"{username}:{token}".encode()).decode()
    return GitLogin(
        variables={
            "HEADRACE_GIT_USERNAME": username,
            "HEADRACE_GIT_TOKEN": token,
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"credential.{parts.scheme}://{parts.netloc}.helper",
            "GIT_CONFIG_VALUE_0": HELPER,
        },
        secrets=(token, quote(token, safe=""), basic),
    )


def _is_sendable(text: str) -> bool:
    """Whether a credential helper can answer with the text. A line break would begin another answer."""
    return 0 < len(text) <= LONGEST_TOKEN and text.isascii() and text.isprintable()


@contextlib.contextmanager
def _key_file(credential: KeyCredential, folder: Path) -> Iterator[Path]:
    if (
        "PRIVATE KEY-----" not in credential.private_key
        or len(credential.private_key) > LONGEST_KEY
    ):
        raise InvalidConfig("this is not a private key; give the file that `ssh-keygen` wrote")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in folder.glob(f"{KEYS}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > LEFT_OVER_S:
                shutil.rmtree(left, ignore_errors=True)
    private = Path(tempfile.mkdtemp(prefix=KEYS, dir=folder))
    try:
        file = private / "key"
        file.touch(mode=0o600, exist_ok=False)
        file.write_text(credential.private_key.strip() + "\n")
        yield file
    finally:
        shutil.rmtree(private, ignore_errors=True)
