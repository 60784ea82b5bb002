"""The socket of the gateway: what else can be asked through it than the own policy."""

import os
import socket

from tests.escapes.attacks.attack import Loot, Targets, attack, claim

GATEWAY = os.environ.get("HEADRACE_GATEWAY_SOCKET", "/run/headrace/gateway.sock")


def _ask(request: bytes, path: str = GATEWAY) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as talking:
        talking.settimeout(0.3)
        talking.connect(path)
        talking.sendall(request)
        answer = b""
        while len(answer) < 1 << 16:
            try:
                chunk = talking.recv(4096)
            except TimeoutError:
                break
            if not chunk:
                break
            answer += chunk
        return answer


def _chat(targets: Targets, path: str) -> bytes:
    """A question in the name of another run's sample."""
    body = b'{"messages": [{"role": "user", "content": "hello"}]}'
    head = (
        f"POST {targets.other_path}/chat/completions HTTP/1.1\r\nHost: gateway\r\n"
        f"Authorization: Bearer {targets.other_key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return _ask(head.encode() + body, path)


@attack()
def key_of_other_run(targets: Targets) -> Loot:
    """Asks the policy in the name of another run's sample, with its key."""
    return _chat(targets, GATEWAY)


@attack()
def socket_of_other_run(targets: Targets) -> Loot:
    """Asks the policy through the socket of another run's sandbox."""
    for place in {os.path.dirname(GATEWAY), targets.temporary, "/tmp", "/run"}:
        for folder, folders, names in os.walk(place):
            del folders[20:]
            for name in names:
                path = f"{folder}/{name}"
                if name.endswith(".sock") and path != GATEWAY and "headrace" in folder:
                    try:
                        _chat(targets, path)
                    except OSError:
                        continue
    return None


@attack()
def many_connections(targets: Targets) -> Loot:
    """Holds as many connections to the gateway as it can. A neighbour asks meanwhile."""
    held = []
    try:
        for _ in range(2000):
            talking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            talking.settimeout(0.05)
            talking.connect(GATEWAY)
            held.append(talking)
    except OSError:
        pass
    return None


@attack()
def proxy_through_gateway(targets: Targets) -> Loot:
    """Asks the gateway to connect to the platform's port."""
    host = f"127.0.0.1:{targets.tcp}"
    found = _ask(f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    return found + _ask(f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())


@attack()
def paths_of_gateway(targets: Targets) -> Loot:
    """Asks the gateway for files and for paths of other services."""
    found = b""
    for path in ("/metrics", "/../../etc/passwd", "/internal", "/v1/models", "/%2e%2e/token"):
        found += _ask(f"GET {path} HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n".encode())
    return claim("the gateway serves files") if b"root:x:0" in found else found


@attack()
def replace_gateway(targets: Targets) -> Loot:
    """Puts a socket of its own in the place of the gateway's, for whoever comes next."""
    os.unlink(GATEWAY)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(GATEWAY)
    return claim("it replaced the gateway's socket")
