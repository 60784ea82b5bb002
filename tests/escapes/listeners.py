"""The ports and sockets of a pretended platform. They record who talks to them."""

import contextlib
import socket
import threading
from pathlib import Path

ANY = "0.0.0.0"  # noqa: S104 - also attacks from other addresses are to be heard


def addresses_of_machine() -> list[str]:
    """The addresses of this machine in its network, without its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return []
        return [str(probe.getsockname()[0])]


def two_free_ports() -> int:
    """A port such that it and the next one are free."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind((ANY, 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                second.bind((ANY, port + 1))
                return port
    raise AssertionError("there are no two free ports in a row")


class Listeners:
    """A TCP port, a UDP port, a socket with a file and an abstract one. Each greets with a secret."""

    def __init__(self, path: Path, abstract: str, secret: str) -> None:
        self._secret = secret.encode()
        self._heard: list[str] = []
        self._open: list[socket.socket] = []
        self.tcp = two_free_ports()
        try:
            six = socket.create_server(
                ("::", self.tcp), family=socket.AF_INET6, dualstack_ipv6=True
            )
        except (OSError, ValueError):
            six = socket.create_server((ANY, self.tcp))
        self._listen(six, "TCP port")
        for address, name in ((str(path), "database socket"), ("\0" + abstract, "abstract socket")):
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listening.bind(address)
            listening.listen()
            self._listen(listening, name)
        path.chmod(0o666)
        self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._datagrams.bind((ANY, 0))
        self.udp = int(self._datagrams.getsockname()[1])
        self._open.append(self._datagrams)
        threading.Thread(target=self._receive, daemon=True).start()

    def take(self) -> list[str]:
        """What was heard since the last time."""
        heard, self._heard[:] = list(self._heard), []
        return heard

    def close(self) -> None:
        for listening in self._open:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()

    def _listen(self, listening: socket.socket, name: str) -> None:
        self._open.append(listening)
        threading.Thread(target=self._serve, args=(listening, name), daemon=True).start()

    def _serve(self, listening: socket.socket, name: str) -> None:
        while True:
            try:
                talking, _ = listening.accept()
            except OSError:
                return
            self._heard.append(f"something connected to the {name}")
            with talking, contextlib.suppress(OSError):
                talking.settimeout(1.0)
                talking.sendall(self._secret)
                self._heard.append(f"the {name} heard {talking.recv(200)!r}")

    def _receive(self) -> None:
        while True:
            try:
                data = self._datagrams.recv(200)
            except OSError:
                return
            if not data:
                return
            self._heard.append(f"the UDP port heard {data!r}")
