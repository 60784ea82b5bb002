"""The port to signed URLs, as the guard uses it."""

from typing import Protocol


class UrlGrant(Protocol):
    """The request that a signed URL allows."""

    @property
    def api_key(self) -> str:
        """The id of the API key that asked for the URL."""
        ...


class SignatureCheck(Protocol):
    """Reads signed URLs."""

    async def read(self, method: str, path: str, query: str) -> UrlGrant:
        """The grant of a URL that allows this request now. Raises Refused."""
        ...
