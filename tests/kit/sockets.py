"""Clients of a gateway, through a unix socket of their own."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from headrace import relay
from infra.http.socket_directory import SocketDirectory
from infra.model_api.gateway.sessions import GatewaySession
from infra.sandbox.user_process import user_group

HOST = "http://gateway"
"""The host part of URLs. A unix socket has none, and the gateway ignores it."""


def http_client(path: Path, *, timeout: float = 30) -> httpx.AsyncClient:
    """A client whose requests go through this socket."""
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    return httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)


def chat_url(session: GatewaySession) -> str:
    """The URL of a sample's chat completions."""
    return f"{HOST}{session.base_path}/chat/completions"


@asynccontextmanager
async def relayed(path: Path) -> AsyncIterator[str]:
    """The SDK's relay to a socket, as in a sandbox: the host part of its URLs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        task = asyncio.ensure_future(relay.serve(listener, str(path)))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class DeadSockets:
    """`infra.ports.services.GatewaySockets` on which nothing listens. `opened` are the open ones."""

    def __init__(self) -> None:
        self._directory = SocketDirectory(group=user_group())
        self.opened: list[Path] = []

    async def open_socket(self, run: str, *, network: Sequence[str] = ()) -> Path:
        path = self._directory.new_path()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
        path.chmod(0o666)
        self.opened.append(path)
        return path

    async def close_socket(self, path: Path) -> None:
        self.opened.remove(path)

    def close(self) -> None:
        self._directory.close()
