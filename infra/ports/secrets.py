"""The ports of secrets: the store that holds their values, and the key that wraps their data keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from schemas.secrets.rules import SecretScope
from schemas.secrets.secret_value import SecretValue


@dataclass(frozen=True, slots=True)
class SecretOwner:
    """The owner of a secret: a workspace (its id), or a person (the owner of an API key)."""

    scope: SecretScope
    id: str


@dataclass(frozen=True, slots=True)
class StoredSecret:
    """A secret as a list shows it, without its value. `key` is the id of the key that wraps it."""

    owner: SecretOwner
    name: str
    key: str
    created_at: datetime
    created_by: str
    updated_at: datetime
    updated_by: str
    used_at: datetime | None


class SecretStore(Protocol):
    """Secrets by their owner and name. Values go in, and come out only for runs."""

    async def put_secret(
        self, owner: SecretOwner, name: str, value: SecretValue, *, by: str
    ) -> bool:
        """Store a secret, or replace its value. Returns whether it is new. Raises Refused when the name
        or the value is not allowed, or the owner has MOST_SECRETS already."""
        ...

    async def all_secrets(self, owners: Sequence[SecretOwner]) -> Sequence[StoredSecret]:
        """Return the secrets of these owners, by scope and name."""
        ...

    async def delete(self, owner: SecretOwner, name: str) -> bool:
        """Delete a secret. Returns whether there was one."""
        ...

    async def missing(
        self, names: Sequence[str], *, workspace: str | None, submitter: str | None
    ) -> tuple[str, ...]:
        """Return those of the names that neither the submitter nor the workspace has."""
        ...

    async def resolve(
        self,
        names: Sequence[str],
        *,
        workspace: str | None,
        submitter: str | None,
        run: str | None = None,
    ) -> Mapping[str, SecretValue]:
        """Return the values for a run, and note that they were used. One that was given for the run or
        evaluation `run` alone comes first, and then the submitter's own before the workspace's. A name
        that none has is left out. Raises InvalidConfig when a value does not open with this process's
        keys."""
        ...

    async def give(self, run: str, values: Mapping[str, SecretValue]) -> None:
        """Store the values for a run or evaluation alone, in the place of all that it was given before.
        Raises Refused when a name or a value is not allowed."""
        ...

    async def take_back(self, run: str) -> None:
        """Delete the values that were given for a run or evaluation alone."""
        ...


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """A data key, encrypted by the key `key`."""

    key: str
    data: bytes


class KeyWrapper(Protocol):
    """A key that encrypts data keys. It may be out of our reach, so that only its owner's service can
    use it. All methods raise InvalidConfig when the key cannot be used, and TransientError when its
    service does not answer."""

    async def key_id(self) -> str:
        """Return the id of the key that wraps now, of at most 255 ASCII characters."""
        ...

    async def knows(self, key: str) -> bool:
        """Return whether a data key that was wrapped with the key `key` can be unwrapped here."""
        ...

    async def wrap(self, data_key: bytes, *, context: str) -> WrappedKey:
        """Encrypt a data key. The context is not secret, and is authenticated with it."""
        ...

    async def unwrap(self, wrapped: WrappedKey, *, context: str) -> bytes:
        """Decrypt a data key. Raises InvalidConfig also when it was changed, or wrapped in another
        context."""
        ...
