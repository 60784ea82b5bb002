"""A free port of this machine, for a server that is started right away."""

import socket


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now. Another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
