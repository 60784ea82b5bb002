"""Secrets that are stored in the database are sealed with AES-256-GCM, under a key that is not there.

A sealed value begins with a format byte and the id of its key (the first four bytes of a hash of the
key), so that a key can be replaced later. The workspace and the name of the field are authenticated with
it, so a value that is moved to another row or column does not open.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256, Hash

from infra.settings.secret_key import KEY_BYTES, parse_key
from infra.settings.settings import Settings
from schemas.errors import InvalidConfig

FORMAT = b"\x01"
KEY_ID_BYTES = 4
NONCE_BYTES = 12
HEADER_BYTES = len(FORMAT) + KEY_ID_BYTES + NONCE_BYTES

FILE = "secret.key"


class Sealer:
    """Seals and opens secrets with the key that `load` returns. The key is loaded at first use."""

    def __init__(self, load: Callable[[], bytes]) -> None:
        self._load = load
        self._key: bytes | None = None

    @classmethod
    def of(cls, settings: Settings) -> "Sealer":
        """The sealer of this installation: with HEADRACE_SECRET_KEY, or else with the key file of its
        home, which is made at first use."""
        return cls(lambda: settings.secret_key or load_key_file(settings.home / FILE))

    def seal(self, value: str, *, workspace: str, field: str) -> bytes:
        """Encrypt a value for one field of one workspace. Raises InvalidConfig without a usable key."""
        key = self.key()
        header = FORMAT + _key_id(key)
        nonce = secrets.token_bytes(NONCE_BYTES)
        bound = _bound_to(header, workspace, field)
        return header + nonce + AESGCM(key).encrypt(nonce, value.encode(), bound)

    def open(self, sealed: bytes, *, workspace: str, field: str) -> str:
        """Decrypt a value that was sealed for this field of this workspace. Raises InvalidConfig when it
        was sealed with another key, for another place, or was changed."""
        key = self.key()
        header, rest = sealed[: HEADER_BYTES - NONCE_BYTES], sealed[HEADER_BYTES - NONCE_BYTES :]
        if header[:1] != FORMAT:
            raise InvalidConfig(
                f"the secret {field} of workspace {workspace} has the format {header[:1].hex()}, which "
                "this version does not know; start a newer version, or connect the workspace again"
            )
        if header != FORMAT + _key_id(key):
            raise InvalidConfig(
                f"the secret {field} of workspace {workspace} was sealed with key {header[1:].hex()}, "
                f"and this process has key {_key_id(key).hex()}; set HEADRACE_SECRET_KEY to the key "
                "that sealed it (without that setting it is in secret.key of HEADRACE_HOME), or "
                "connect the workspace again"
            )
        nonce, encrypted = rest[:NONCE_BYTES], rest[NONCE_BYTES:]
        try:
            return (
                AESGCM(key).decrypt(nonce, encrypted, _bound_to(header, workspace, field)).decode()
            )
        except (InvalidTag, ValueError) as error:
            raise InvalidConfig(
                f"the secret {field} of workspace {workspace} was changed after it was sealed, or "
                "belongs to another workspace; connect the workspace again"
            ) from error

    def key(self) -> bytes:
        """Return the key. Raises InvalidConfig when there is none that can be used."""
        if self._key is None:
            self._key = self._load()
        return self._key


def load_key_file(path: Path) -> bytes:
    """Return the key in a file, which only its owner may read. A missing file is made with a new key.
    Several processes that make it at the same time get the same key. Raises InvalidConfig."""
    try:
        if not path.exists():
            _make_key_file(path)
        path.chmod(0o600)
        return parse_key(path.read_text(encoding="ascii").strip())
    except (ValueError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else "it does not hold a key"
        raise InvalidConfig(
            f"the key file {path} cannot be used ({why}); restore it from a backup, or set "
            f"HEADRACE_SECRET_KEY to {KEY_BYTES} bytes as hex or base64"
        ) from error


def _make_key_file(path: Path) -> None:
    """Make the file, complete from the moment that it has its name. A file that another process made in
    the meantime stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{secrets.token_hex(KEY_BYTES)}\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(scratch)
        except FileExistsError:
            return
    finally:
        scratch.unlink()
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _key_id(key: bytes) -> bytes:
    hashed = Hash(SHA256())
    hashed.update(b"headrace secret key\0" + key)
    return hashed.finalize()[:KEY_ID_BYTES]


def _bound_to(header: bytes, workspace: str, field: str) -> bytes:
    return header + f"{len(workspace)}/{workspace}/{field}".encode()
