"""The way to the package index for a sandbox service that has no network of its own.

`python -m infra.sandbox.environments.index_proxy --listen tcp://0.0.0.0:8423` connects to the hosts of
the index that HEADRACE_PACKAGE_INDEX and HEADRACE_PACKAGE_HOSTS name, and nowhere else, because user
code of level `process-trusted` can reach it too. The service names it in HTTPS_PROXY and HTTP_PROXY.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from urllib.parse import urlsplit

from infra.sandbox.environments.index_relay import LARGEST_HEAD, IndexRelay
from infra.settings.packages import PackageSettings
from schemas.errors import Refused


def main() -> int:
    """Serve until SIGTERM. Exit codes: 0 ended in order, 1 a setting cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m infra.sandbox.environments.index_proxy")
    parser.add_argument("--listen", required=True, metavar="tcp://HOST:PORT")
    place = urlsplit(parser.parse_args().listen)
    try:
        if place.scheme != "tcp" or not place.hostname or not place.port:
            raise ValueError("--listen is not an address; write it like tcp://0.0.0.0:8423")
        packages = PackageSettings.load(os.environ)
        relay = IndexRelay(packages.index, hosts=packages.hosts, environ=os.environ, is_strict=True)
    except (ValueError, Refused) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    asyncio.run(_serve(relay, place.hostname, place.port))
    return 0


async def _serve(relay: IndexRelay, host: str, port: int) -> None:
    server = await asyncio.start_server(relay.accept, host, port, limit=LARGEST_HEAD)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    with contextlib.suppress(asyncio.CancelledError):
        await ended.wait()
    server.close()


if __name__ == "__main__":
    sys.exit(main())
