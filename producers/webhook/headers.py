"""The headers of a request as they arrived. A header that comes twice has no value, because two programs
would not agree on which one counts."""

from collections.abc import Iterable


class RequestHeaders:
    """The headers of an ASGI scope. Names are lower-case bytes."""

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        self._values: dict[bytes, bytes | None] = {}
        for name, value in raw:
            self._values[name] = None if name in self._values else value

    def one(self, name: bytes) -> bytes | None:
        """Return the value of a header; None when it is missing or comes more than once."""
        return self._values.get(name)

    def is_doubled(self, name: bytes) -> bool:
        return name in self._values and self._values[name] is None
