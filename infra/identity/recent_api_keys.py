"""The API keys that a process knows. They are read from the database as a whole, at most a few
times a second, so requests with unknown keys cost no query of their own.

A revocation takes effect at once in the process that did it, and within KEPT_S in others. While the
database does not answer, the keys that were read last stay valid for STALE_S.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

from infra.identity.api_key_format import api_key_id, digest
from infra.identity.api_keys import ApiKey
from infra.spine.ports.clock import Clock
from infra.spine.postgres.errors import UNAVAILABLE_ERRORS
from schemas.errors import TransientError

KEPT_S = 2.0
STALE_S = 5.0
ASK_AGAIN_S = 0.25
"""How soon the API keys are read again when one is unknown, because it may have just been created."""

RELOAD_S = 60.0
"""The API keys are read completely at least this often, even if their mark has not changed."""

USED_S = 60.0
"""How often the last use of an API key is written."""


class ApiKeySource(Protocol):
    async def mark(self) -> str:
        """A text that changes whenever an API key is created, rotated or revoked."""
        ...

    async def read_all(self) -> Sequence[ApiKey]:
        """All valid API keys, and some that were revoked."""
        ...


class RecentApiKeys:
    """Finds API keys by their text."""

    def __init__(self, source: ApiKeySource, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._api_keys: Mapping[str, ApiKey] = {}
        self._mark: str | None = None
        self._read_at = float("-inf")
        self._loaded_at = float("-inf")
        self._asked_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._used: dict[str, datetime] = {}
        self._used_written: dict[str, float] = {}

    async def find(self, text: str) -> ApiKey | None:
        """The API key with this text, valid or not; None when it is unknown. Raises TransientError
        when the database has not answered for STALE_S."""
        identity = api_key_id(text)
        if identity is None:
            return None
        return await self.find_digest(identity, digest(text))

    async def find_digest(self, identity: str, sha256: bytes) -> ApiKey | None:
        """The API key with this id, valid or not; None unless its text, or the one before the last
        rotation, has this SHA-256. Raises TransientError, as `find`."""
        found = await self._find_with_secret(identity, sha256)
        if found is not None and found.is_valid(self._clock.now()):
            self._used[found.id] = self._clock.now()
        return found

    async def find_id(self, identity: str) -> ApiKey | None:
        """The API key with this id, valid or not. Raises TransientError, as `find`."""
        return await self._find_known(identity)

    async def secrets_of(self, identity: str) -> tuple[bytes, ...]:
        """The SHA-256 of the text of the API key with this id, valid or not, and of the text before its
        last rotation while that one is valid. Empty when the key is unknown. Raises TransientError, as
        `find`."""
        found = await self._find_known(identity)
        if found is None:
            return ()
        old = None if found.old_sha256 is None else found.with_secret(found.old_sha256)
        if old is None or not old.is_valid(self._clock.now()):
            return (found.sha256,)
        return (found.sha256, old.sha256)

    async def is_valid(self, identity: str, sha256: bytes) -> bool:
        """Whether an API key (its id and the SHA-256 of its text) is still valid. Raises
        TransientError, as `find`."""
        found = await self._find_with_secret(identity, sha256)
        return found is not None and found.is_valid(self._clock.now())

    def forget(self) -> None:
        """Read the API keys again before the next request is answered."""
        self._read_at = self._asked_at = float("-inf")
        self._mark = None

    def take_used(self) -> dict[str, datetime]:
        """When API keys were used last, for those whose last use is due to be written."""
        now = self._clock.elapsed_s()
        due = {
            identity: at
            for identity, at in self._used.items()
            if now - self._used_written.get(identity, float("-inf")) >= USED_S
        }
        for identity in due:
            del self._used[identity]
            self._used_written[identity] = now
        self._used_written = {
            identity: at for identity, at in self._used_written.items() if now - at < USED_S
        }
        return due

    async def _find_with_secret(self, identity: str, sha256: bytes) -> ApiKey | None:
        known = await self._find_known(identity)
        return None if known is None else known.with_secret(sha256)

    async def _find_known(self, identity: str) -> ApiKey | None:
        now = self._clock.elapsed_s()
        patience = KEPT_S if identity in self._api_keys else ASK_AGAIN_S
        if now - self._read_at >= patience and now - self._asked_at >= ASK_AGAIN_S:
            await self._read()
        if self._clock.elapsed_s() - self._read_at >= STALE_S:
            raise TransientError("the API keys cannot be read from the database now; try again")
        return self._api_keys.get(identity)

    async def _read(self) -> None:
        """Read the API keys, once for all requests that wait for them."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read_from_source())
        await asyncio.shield(self._reading)

    async def _read_from_source(self) -> None:
        began = self._clock.elapsed_s()
        try:
            mark = await self._source.mark()
            if mark != self._mark or began - self._loaded_at >= RELOAD_S:
                self._api_keys = {api_key.id: api_key for api_key in await self._source.read_all()}
                self._mark, self._loaded_at = mark, began
            self._read_at = began
        except UNAVAILABLE_ERRORS:
            self._asked_at = began  # the API keys that were read last stay valid for a while
        finally:
            self._reading = None
