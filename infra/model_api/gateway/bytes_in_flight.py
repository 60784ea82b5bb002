"""Bounds the bytes of the requests that are held at the same time: those of one key, those of an
organisation, and all together.

A request is held from the first byte of its body until it is answered. Its bytes are counted before they
are read, because an unread body stays in the client's socket.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from infra.model_api.gateway.bodies import LONGEST_BODY, SMALL_BODY
from infra.model_api.wire.errors import GatewayError

MIB = 1 << 20
BYTES_OF_A_KEY = 32 * MIB
BYTES_OF_AN_ORGANISATION = 64 * MIB
"""Fewer than all may have, so that one organisation with many keys leaves room for the others."""
BYTES_IN_ALL = 128 * MIB
REQUESTS_OF_A_KEY = 512


class BytesInFlight:
    """Counts requests that are held. `of_key` is the most bytes of one key, and `in_all` of all keys
    together. A body of at most SMALL_BODY bytes counts for its key only, so that a few keys with large
    bodies do not shut out the others. The same holds for `of_organisation`, the most bytes of all keys
    of one organisation. `requests` is the most requests of one key."""

    def __init__(
        self,
        *,
        of_key: int = BYTES_OF_A_KEY,
        of_organisation: int = BYTES_OF_AN_ORGANISATION,
        in_all: int = BYTES_IN_ALL,
        requests: int = REQUESTS_OF_A_KEY,
    ) -> None:
        self._of_key = of_key
        self._of_organisation = of_organisation
        self._in_all = in_all
        self._requests = requests
        self._keys: Counter[str] = Counter()
        self._num: Counter[str] = Counter()
        self._organisations: Counter[str] = Counter()
        self._large = 0
        self._freed = asyncio.Event()

    @property
    def num_large_bytes(self) -> int:
        """The bytes of all larger bodies that are held now."""
        return self._large

    @contextmanager
    def hold(
        self, key: str | None = None, *, organisation: str | None = None
    ) -> Iterator["HeldRequest"]:
        """Hold a request inside the block, of a key of an organisation (None: of none). Its key may be
        named later. Raises GatewayError (429)."""
        held = HeldRequest(self, organisation)
        try:
            if key is not None:
                held.belongs_to(key)
            yield held
        finally:
            held.release()

    @asynccontextmanager
    async def wait_for_room(self, key: str, num_bytes: int | None) -> AsyncIterator["HeldRequest"]:
        """Wait until a body of this length may be read (None: of any length), and hold its request
        inside the block. Small ones do not wait. The number of requests has no limit here."""
        length = LONGEST_BODY if num_bytes is None else min(num_bytes, LONGEST_BODY)
        held = HeldRequest(self)
        held.key = key
        while length > SMALL_BODY and self.refusal(held, length) is not None:
            self._freed.clear()
            await self._freed.wait()
        try:
            held.take(length)
            yield held
        finally:
            held.release()

    def refusal(self, held: "HeldRequest", length: int) -> GatewayError | None:
        """Why a request may not have this many bytes now, or None if it may."""
        of_key = self._keys[held.key] - held.length if held.key is not None else 0
        if held.key is not None and of_key + length > self._of_key:
            return GatewayError(
                429,
                "too_many_requests",
                f"the requests of one key that are not answered yet may have {self._of_key} bytes "
                f"together; this one has {length} and the others {of_key}; try again",
            )
        same = self._organisations[held.organisation] - held.large if held.organisation else 0
        if held.organisation and length > SMALL_BODY and same + length > self._of_organisation:
            return GatewayError(
                429,
                "too_many_requests",
                f"the requests of your organisation that are not answered yet have {same} of at most "
                f"{self._of_organisation} bytes, and this one has {length}; try again",
            )
        others = self._large - held.large
        if length > SMALL_BODY and others + length > self._in_all:
            return GatewayError(
                503,
                "overloaded",
                f"the requests that are being answered have {others} of at most {self._in_all} bytes; "
                "try again",
            )
        return None

    def check_number(self, key: str) -> None:
        """Raise GatewayError (429) when a key has too many requests."""
        if self._num[key] >= self._requests:
            text = f"{self._requests} requests of this key are being answered; try again"
            raise GatewayError(429, "too_many_requests", text)

    def change(self, held: "HeldRequest", *, num: int, length: int, large: int) -> None:
        """Add to the counts of a request."""
        self._large += large
        key, organisation = held.key, held.organisation
        if organisation is not None:
            self._organisations[organisation] += large
            if not self._organisations[organisation]:
                del self._organisations[organisation]
        if key is not None:
            self._num[key] += num
            self._keys[key] += length
            if not self._num[key] and not self._keys[key]:
                del self._num[key], self._keys[key]
        if length < 0 or large < 0:
            self._freed.set()


class HeldRequest:
    """One request that is held (`infra.model_api.gateway.bodies.BytesBudget`)."""

    def __init__(self, of: BytesInFlight, organisation: str | None = None) -> None:
        self._of = of
        self.organisation = organisation
        self._is_counted = False
        self._received = 0
        self.key: str | None = None
        self.length = 0

    @property
    def large(self) -> int:
        """Its bytes, if they count among those of all keys."""
        return self.length if self.length > SMALL_BODY else 0

    def belongs_to(self, key: str) -> None:
        """Count it for a key. Raises GatewayError (429) when that key has too many."""
        self._of.check_number(key)
        length = self.length
        self.take(0)
        self.key = key
        self.check_room(length)
        self._is_counted = True
        self._of.change(self, num=1, length=0, large=0)

    def check_room(self, num_bytes: int) -> None:
        """Count a body of this length before it is read. Raises GatewayError (429 or 503)."""
        refusal = self._of.refusal(self, num_bytes)
        if refusal is not None:
            raise refusal
        self.take(num_bytes)

    def count_received(self, num_bytes: int) -> None:
        """Count a part of the body that has arrived. Raises GatewayError (429 or 503)."""
        self._received += num_bytes
        if self._received > self.length:
            self.check_room(self._received)

    def take(self, length: int) -> None:
        """Set the number of its bytes."""
        before, before_large = self.length, self.large
        self.length = length
        self._of.change(self, num=0, length=length - before, large=self.large - before_large)

    def release(self) -> None:
        """Count it no more."""
        self.take(0)
        if self._is_counted:
            self._is_counted = False
            self._of.change(self, num=-1, length=0, large=0)
