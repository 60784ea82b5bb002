"""Which keys a blob may have. The rule is the same in a directory, in memory and in a bucket.

A valid key cannot lead out of the store's root, and needs no quoting in a URI.
"""

import re

KEY = re.compile(r"[A-Za-z0-9_@.-]+(/[A-Za-z0-9_@.-]+)*")
"""Words of safe characters, separated by slashes."""


def is_key(key: str) -> bool:
    """Whether `key` is a valid blob key. An object with another name is not ours."""
    return bool(KEY.fullmatch(key)) and not {".", ".."} & set(key.split("/"))


def check_key(key: str) -> None:
    """Raise ValueError when `key` is not a valid blob key."""
    if not is_key(key):
        raise ValueError(f"{key!r} is not a blob key")


def check_prefix(prefix: str) -> None:
    """Raise ValueError when no key can begin with `prefix`. The empty prefix is valid."""
    if prefix:
        check_key(prefix.removesuffix("/"))
