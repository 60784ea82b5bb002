"""What a blob may be called: the same in a directory, in memory and in a bucket.

So a key never leaves the root it is put under, and never needs quoting in a uri.
"""

import re

KEY = re.compile(r"[A-Za-z0-9_@.-]+(/[A-Za-z0-9_@.-]+)*")
"""Words of harmless characters between slashes."""


def is_key(key: str) -> bool:
    """Whether `key` can name a blob. What is called otherwise was put there by somebody else."""
    return bool(KEY.fullmatch(key)) and not {".", ".."} & set(key.split("/"))


def check_key(key: str) -> None:
    """Raises ValueError when `key` cannot name a blob."""
    if not is_key(key):
        raise ValueError(f"{key!r} is not a blob key")


def check_prefix(prefix: str) -> None:
    """Raises ValueError when no key can begin with `prefix`. The empty one begins them all."""
    if prefix:
        check_key(prefix.removesuffix("/"))
