"""The port to a blob store that clients reach themselves: URLs of the store, each for one request.

A client sends the bytes of a key straight to the store. So nothing is known of them until they are
listed, and they may be replaced until their URL has expired. Whoever reads them names the ETag that
they had, and gets those bytes or none.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SentBlob:
    """Bytes that a client sent to the store: their URI, how many they are, and the store's ETag."""

    uri: str
    size: int
    etag: str


class DirectBlobs(Protocol):
    """A store that clients may reach."""

    @property
    def is_public(self) -> bool:
        """Whether clients reach the store at an address of its own. Without one it makes no URLs."""
        ...

    async def put_urls(self, wanted: Sequence[tuple[str, int]], *, for_s: int) -> list[str]:
        """A URL for each key and size. It allows one PUT of exactly that many bytes to that key."""
        ...

    async def get_url(self, uri: str, *, file_name: str, for_s: int) -> str | None:
        """A URL that allows to GET a blob, also by ranges, as a file of this name. None where the blob
        is not in this store."""
        ...

    async def list_sent(self, prefix: str) -> Mapping[str, SentBlob]:
        """The blobs that clients sent to keys that begin with `prefix`, by key."""
        ...

    def read_sent(self, blob: SentBlob) -> AsyncIterator[bytes]:
        """Yield the bytes. Raises Conflict when they were replaced since they were listed."""
        ...

    async def abort_unfinished(self, *, before: datetime) -> int:
        """End uploads in parts that began earlier and were never finished, whose parts take space
        unseen. Returns how many they were."""
        ...
