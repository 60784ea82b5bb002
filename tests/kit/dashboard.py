"""The application behind a real HTTP server in a thread, for tests that open it in a browser."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer
from infra.identity.api_key_format import digest
from infra.identity.sessions import Bearer
from infra.ports.actor import ROOT
from tests.kit.application import API_KEY, Application, application
from tests.kit.postgres import fresh_database

T = TypeVar("T")
WITHIN_S = 60


@dataclass
class ServedDashboard:
    """A running server. `app` lives in the loop of its thread: use it in `run` only."""

    app: Application
    url: str
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, T], *, within_s: float = 4 * WITHIN_S) -> T:
        """What the work returns, done in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(within_s)

    def sign_in_link(self) -> str:
        """An address with a button that opens a session with all rights once."""
        code = self.run(self.app.services.sessions.issue_code(Bearer(ROOT, digest(API_KEY))))
        return f"{self.url}/login?code={code}"


@contextmanager
def served_dashboard(
    postgres_url: str, home: Path, *, port: int = 0, environ: Mapping[str, str] = {}
) -> Iterator[ServedDashboard]:
    """The application over a fresh database, served on a port (0: a free one) until the block ends."""
    ready: Future[tuple[Application, str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve(database_url: str) -> None:
        async with application(database_url, home, environ=environ) as app:
            server = HttpServer(app.app, host="127.0.0.1", port=port, limits=ConnectionLimits())
            await server.listen()
            serving = asyncio.ensure_future(server.serve())
            ended = asyncio.Event()
            url = f"http://127.0.0.1:{server.port}"
            ready.set_result((app, url, asyncio.get_running_loop(), ended))
            await ended.wait()
            server.stop()
            await serving

    def work() -> None:
        try:
            with fresh_database(postgres_url) as database_url:
                asyncio.run(serve(database_url))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=work, name="dashboard")
    thread.start()
    app, url, loop, ended = ready.result(WITHIN_S)
    try:
        yield ServedDashboard(app, url, loop)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(WITHIN_S)
