"""The form of the keys that seal secrets: 32 bytes as hex or base64, or `kms:` and the name of a key of
AWS KMS."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

KEY_BYTES = 32
KMS = "kms:"
LONGEST_KMS_NAME = 256

CURRENT, OLDER = "HEADRACE_SECRET_KEY", "HEADRACE_SECRET_KEYS_OLD"


@dataclass(frozen=True, slots=True)
class KmsKey:
    """A key of AWS KMS, by its id, ARN or alias."""

    name: str


KeySource = bytes | KmsKey
"""A key itself, or the name of one that never leaves KMS."""


def parse_key(text: str) -> bytes:
    """Return the key that `text` holds. Raises ValueError. The message never holds the text."""
    try:
        key = bytes.fromhex(text) if len(text) == 2 * KEY_BYTES else _from_base64(text)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"not {KEY_BYTES} bytes as hex or base64")
    return key


def parse_source(text: str) -> KeySource:
    """Return the key, or the KMS key, that `text` holds. Raises ValueError without the text."""
    if not text.startswith(KMS):
        return parse_key(text)
    name = text.removeprefix(KMS)
    if not name or len(name) > LONGEST_KMS_NAME or not name.isascii() or not name.isprintable():
        raise ValueError("no name of a KMS key")
    return KmsKey(name)


def load_sources(environ: Mapping[str, str]) -> tuple[KeySource | None, tuple[KeySource, ...]]:
    """Return the current key and the older ones from the environment. The current one is None where the
    key file of the home is used. Raises ValueError, which names the variable and not its value."""
    current, older = environ.get(CURRENT), environ.get(OLDER)
    try:
        key = parse_source(current.strip()) if current else None
    except ValueError as error:
        raise ValueError(
            f"{CURRENT} holds no key; it may hold {KEY_BYTES} random bytes as hex or base64 (make one "
            "with: openssl rand -hex 32), or kms: and the id or alias of a KMS key"
        ) from error
    try:
        return key, tuple(parse_source(one.strip()) for one in (older or "").split(",") if one)
    except ValueError as error:
        raise ValueError(
            f"{OLDER} does not hold keys; it may hold keys like {CURRENT}, with commas between them"
        ) from error


def _from_base64(text: str) -> bytes:
    plain = text.replace("-", "+").replace("_", "/").rstrip("=")
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
