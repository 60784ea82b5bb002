"""Credentials for a private repository and the API of its forge: a token, a deploy key, a GitHub App."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TokenCredential:
    """An access token. Git sends it as the password of `username`."""

    username: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeyCredential:
    """The private half of a deploy key, as OpenSSH writes it."""

    private_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class AppCredential:
    """A GitHub App. Its private key (PEM) signs requests for installation tokens. Without
    `installation` the one of the repository is looked up."""

    app_id: str
    private_key: str = field(repr=False)
    installation: str | None = None


Credential = TokenCredential | KeyCredential | AppCredential
GitCredential = TokenCredential | KeyCredential
"""The credentials that git itself understands. An App is turned into a token first."""

CredentialSource: TypeAlias = Callable[[str], Awaitable[GitCredential | None]]
"""Returns the credential of a workspace's repository by the workspace's id, or None."""
