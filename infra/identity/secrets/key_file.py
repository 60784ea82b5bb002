"""The key file of a home, which only its owner may read, and the file with the keys before it."""

import os
import secrets
from pathlib import Path

from infra.settings.secret_key import KEY_BYTES, parse_key
from schemas.errors import InvalidConfig

FILE, OLD_FILE = "secret.key", "secret.key.old"


def load_key_file(path: Path) -> bytes:
    """Return the key in a file, which only its owner may read. A missing file is made with a new key.
    Several processes that make it at the same time get the same key. Raises InvalidConfig."""
    try:
        if not path.exists():
            _make_key_file(path)
        path.chmod(0o600)
        return parse_key(path.read_text(encoding="ascii").strip())
    except (ValueError, OSError) as error:
        raise _unusable(path, error) from error


def load_old_keys(path: Path) -> tuple[bytes, ...]:
    """Return the keys in a file, one in each line. A missing file holds none. Raises InvalidConfig."""
    try:
        if not path.exists():
            return ()
        path.chmod(0o600)
        return tuple(parse_key(line) for line in path.read_text(encoding="ascii").split())
    except (ValueError, OSError) as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: Exception) -> InvalidConfig:
    why = error.strerror if isinstance(error, OSError) else "it does not hold a key"
    return InvalidConfig(
        f"the key file {path} cannot be used ({why}); restore it from a backup, or set "
        f"HEADRACE_SECRET_KEY to {KEY_BYTES} bytes as hex or base64"
    )


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
