"""The form of API keys: `hr_<id>_<secret><checksum>`.

The id names the row in the database and may be shown. The secret has 256 random bits. The checksum
tells a mistyped or invented key from a real one without a look into the database, and lets a
scanner for secrets be sure of what it found.
"""

import hashlib
import re
import secrets
import string
import zlib
from dataclasses import dataclass, field

PREFIX = "hr"
ID_LENGTH = 10
SECRET_BITS = 256
SECRET_LENGTH = 43
CHECKSUM_LENGTH = 6

ID_DIGITS = string.digits + string.ascii_lowercase
BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase

API_KEY = re.compile(
    rf"{PREFIX}_([0-9a-z]{{{ID_LENGTH}}})_[0-9A-Za-z]{{{SECRET_LENGTH + CHECKSUM_LENGTH}}}"
)


@dataclass(frozen=True, slots=True)
class IssuedApiKey:
    """A new API key: its id, the prefix by which people recognise it, and its text, which is shown
    once."""

    id: str
    text: str = field(repr=False)

    @property
    def prefix(self) -> str:
        return f"{PREFIX}_{self.id}"

    @property
    def sha256(self) -> bytes:
        return digest(self.text)


def issue_api_key(identity: str | None = None) -> IssuedApiKey:
    """Make a new API key, or a new secret for the key with this id."""
    identity = identity or "".join(secrets.choice(ID_DIGITS) for _ in range(ID_LENGTH))
    body = f"{PREFIX}_{identity}_{_to_base62(secrets.randbits(SECRET_BITS), SECRET_LENGTH)}"
    return IssuedApiKey(identity, body + _checksum(body))


def api_key_id(text: str) -> str | None:
    """The id in an API key; None when the text does not have the form of a key, checksum included."""
    found = API_KEY.fullmatch(text)
    if found is None or _checksum(text[:-CHECKSUM_LENGTH]) != text[-CHECKSUM_LENGTH:]:
        return None
    return found[1]


def is_api_key_id(text: str) -> bool:
    """Whether a text is the id of an API key in the database, and not of one of the settings."""
    return len(text) == ID_LENGTH and all(digit in ID_DIGITS for digit in text)


def digest(text: str) -> bytes:
    """The SHA-256 of an API key, which is all that the database holds of its secret."""
    return hashlib.sha256(text.encode()).digest()


def _checksum(body: str) -> str:
    return _to_base62(zlib.crc32(body.encode()), CHECKSUM_LENGTH)


def _to_base62(number: int, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(BASE62))
        digits.append(BASE62[digit])
    return "".join(reversed(digits))
