"""Signatures of webhooks: the HMAC-SHA256 of the raw body under each valid secret, compared in constant
time.

A request always costs two HMACs, whether its workspace has two secrets, one, or none, or does not exist.
A random key stands for each missing one. So the time of an answer does not tell which workspaces exist.
"""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

MOST_SECRETS = 2
"""The secret, and during a rotation the one before it."""

PREFIX = b"sha256="


@dataclass(frozen=True)
class WebhookKeys:
    """The keys to check a body with."""

    secrets: tuple[bytes, ...]
    body: bytes | bytearray

    @classmethod
    def of(cls, valid: Sequence[str], body: bytes | bytearray) -> "WebhookKeys":
        """The keys for a workspace with these valid secrets."""
        known = [secret.encode() for secret in valid[:MOST_SECRETS] if secret]
        missing = MOST_SECRETS - len(known)
        return cls((*known, *(secrets.token_bytes(32) for _ in range(missing))), body)

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """The hex HMAC-SHA256 of the body under each key."""
        return tuple(hmac.digest(key, self.body, "sha256").hex().encode() for key in self.secrets)

    def accept(self, signature: bytes) -> bool:
        """Whether `signature` is `sha256=` and the lower-case hex digest under one of the keys."""
        return _one_of(signature, [PREFIX + digest for digest in self.digests])

    def include(self, token: bytes) -> bool:
        """Whether `token` is one of the keys itself. Hashes are compared, so that the time does not
        depend on the lengths."""
        hashed = [hashlib.sha256(key).digest() for key in self.secrets]
        return _one_of(hashlib.sha256(token).digest(), hashed)


def _one_of(value: bytes, candidates: Sequence[bytes]) -> bool:
    found = False
    for candidate in candidates:
        found |= hmac.compare_digest(value, candidate)
    return found
