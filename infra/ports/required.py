"""What an effect's lane promises: whoever takes a lane has the ports that the lane needs."""

from typing import TypeVar

P = TypeVar("P")


def need(port: P | None, what: str) -> P:
    """The port. Raises RuntimeError in a process that should never have claimed the effect."""
    if port is None:
        raise RuntimeError(f"no {what} here: this effect should not have reached this process")
    return port
