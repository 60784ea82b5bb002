"""`python -m infra.sandbox.service (--fd N --parent PID | --listen tcp://HOST:PORT)`: the process that
starts user code. It holds no credentials of the platform.

With `--fd` it serves the process that started it, over that descriptor, and ends with it. With
`--listen` it serves all clients that have a certificate of the authority HEADRACE_SANDBOX_TLS_CA, and
shows its own (HEADRACE_SANDBOX_TLS_CERT and _KEY). HEADRACE_SANDBOX names the level.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import ssl
import sys

from infra.sandbox.service.listener import READ_AHEAD, SandboxListener
from infra.sandbox.service.self_protection import die_with_parent, hide_memory
from infra.sandbox.service.session import ServiceSession
from infra.sandbox.service.snapshots import SnapshotCache
from infra.sandbox.service.sockets import RemoteSockets
from infra.sandbox.service.tls import check_key_is_hidden, make_context
from infra.settings.packages import PackageSettings
from infra.settings.sandbox_limits import load_sandbox_limits
from infra.settings.sandbox_service import VARIABLES, SandboxCertificates, listen_address
from infra.settings.settings import sandbox_level


async def serve_parent(descriptor: int, level: str) -> None:
    """Serve the process at the other end of a socket pair."""
    end = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_connection(sock=end, limit=READ_AHEAD)
    snapshots = SnapshotCache()
    session = ServiceSession(
        reader, writer, level=level, snapshots=snapshots, make_sockets=RemoteSockets
    )
    try:
        await session.serve()
    finally:
        snapshots.close()


async def serve_clients(url: str, context: ssl.SSLContext, level: str) -> None:
    """Serve clients until SIGTERM or SIGINT. Prints the port, because `url` may hold port 0."""
    listener = SandboxListener(url, context, level=level)
    await listener.listen()
    sys.stdout.write(f"listening on port {listener.port}\n")
    sys.stdout.flush()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()
    await listener.aclose()


def _take_certificates(level: str) -> ssl.SSLContext:
    """Read our certificates and remove them from the environment. Raises ValueError."""
    certificates = SandboxCertificates.load(os.environ)
    for name in VARIABLES:
        del os.environ[name]
    check_key_is_hidden(certificates, level)
    return make_context(certificates, is_service=True)


def main() -> int:
    """Serve. Exit codes: 0 done, 1 refused, 2 usage."""
    parser = argparse.ArgumentParser(prog="python -m infra.sandbox.service", description=__doc__)
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--fd", type=int)
    ways.add_argument("--listen", metavar="tcp://HOST:PORT")
    parser.add_argument("--parent", type=int, default=0)
    options = parser.parse_args()
    hide_memory()
    os.umask(0o022)  # the user of user code reads what is unpacked here; no secret is written
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        level = sandbox_level(os.environ)
        PackageSettings.load(os.environ)
        load_sandbox_limits(os.environ)
        url = listen_address(options.listen) if options.listen else None
        context = _take_certificates(level) if url else None
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if url is not None and context is not None:
        asyncio.run(serve_clients(url, context, level))
    else:
        die_with_parent(options.parent)
        asyncio.run(serve_parent(options.fd, level))
    return 0


if __name__ == "__main__":
    sys.exit(main())
