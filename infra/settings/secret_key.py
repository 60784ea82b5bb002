"""The form of the key that seals secrets: 32 bytes, as hex or base64."""

import base64
import binascii

KEY_BYTES = 32


def parse_key(text: str) -> bytes:
    """Return the key that `text` holds. Raises ValueError. The message never holds the text."""
    try:
        key = bytes.fromhex(text) if len(text) == 2 * KEY_BYTES else _from_base64(text)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"not {KEY_BYTES} bytes as hex or base64")
    return key


def _from_base64(text: str) -> bytes:
    plain = text.replace("-", "+").replace("_", "/").rstrip("=")
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
