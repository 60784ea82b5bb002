"""`make fuzz`: mutated webhooks against the application over a real database. Exits 1 when any is
answered wrongly, and prints it.

    python -m tests.fuzz --count 1000000 --seed 0
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.webhooks import SECRET, WORKSPACE, Findings, fuzz
from tests.kit.application import Application, application
from tests.kit.postgres import fresh_database
from tests.stack.postgres import PostgresServer


async def connect_workspace(served: Application) -> None:
    """Connect the workspace that is fuzzed."""
    services = served.services
    await services.readmodel.names.take("workspace", WORKSPACE, "w-fuzzed")
    await services.connections.put_connection(
        "w-fuzzed", forge="github", url="/srv/fuzzed.git", secret=SECRET
    )


async def _fuzz(url: str, home: Path, *, seed: int, count: int) -> Findings:
    async with application(url, home) as served:
        await connect_workspace(served)
        return await fuzz(served.app, seed=seed, count=count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-fuzz-") as folder:
        root = Path(folder)
        root.chmod(0o755)  # as root, the server runs as another user
        server = PostgresServer(root / "postgres")
        server.start()
        try:
            with fresh_database(server.url) as url:
                found = asyncio.run(
                    _fuzz(url, root / "home", seed=options.seed, count=options.count)
                )
        finally:
            server.stop()
    print(f"{options.count} requests in {time.monotonic() - began:.0f} s, seed {options.seed}")
    print(f"authentic: {found.authentic}; answers: {dict(found.statuses.most_common())}")
    for status, one in found.wrong[:5]:
        print(f"wrong: {status} for {one!r:.2000}")
    print(f"answered wrongly: {len(found.wrong)}")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
