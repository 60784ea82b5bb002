"""Closes a connection so that its client can read the answer, also while it still sends a body.

A socket that is closed with unread bytes resets the connection, and a reset can discard an answer that
the client has not read yet. So the answer is sent, then the end of our side, and what the client still
sends is read and dropped, within limits.
"""

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_S = 5.0
"""How long a client may go on sending after its answer."""


class GracefulTransport:
    """The transport of one connection. `close` closes it at once if `most_bytes` returns 0. Otherwise it
    ends our side only, and that many bytes are dropped before the connection is closed."""

    def __init__(self, transport: asyncio.Transport, most_bytes: Callable[[], int]) -> None:
        self._transport = transport
        self._most_bytes = most_bytes
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def is_lingering(self) -> bool:
        return self._timer is not None

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        self._left = self._most_bytes()
        if self._left:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self.abort)
            self._transport.write_eof()
            self._transport.resume_reading()
        else:
            self._transport.close()

    def drop(self, data: bytes) -> None:
        """Drop bytes that have arrived after the answer."""
        self._left -= len(data)
        if self._left < 0:
            self.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self.forget()
        self._transport.abort()

    def forget(self) -> None:
        """Stop the clock, because the connection is closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
