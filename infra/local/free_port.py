"""A free port of this machine, for what is started here and now."""

import socket


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody has now. Somebody else may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
