"""The other sides of B3: the same durable work by Procrastinate and by DBOS, each as its manual
describes it.

A message is durable before its sender goes on. A worker decides on it once, and the decision is durable.
The decision is performed once, and the outcome is durable. Both use what makes them faster: listening
instead of polling, many messages at once, and a poll of 10 ms where polling is needed.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Ask = Callable[[str], Awaitable[object]]
"""Send one message (its id); returns once it is durable."""

AT_ONCE = 32
POOL = 16
FACTS = "create table facts (message text, kind text, primary key (message, kind))"
FACT = "insert into facts values (%(message)s, %(kind)s) on conflict do nothing"


class Procrastinate:
    """A job per message whose task defers a second job; the facts are rows of another table."""

    name = "Procrastinate"
    done_sql = "select count(*) from facts where kind = 'performed'"

    def _app(self, url: str) -> Any:
        from procrastinate import App, PsycopgConnector

        return App(connector=PsycopgConnector(conninfo=url, min_size=4, max_size=POOL))

    async def prepare(self, url: str) -> None:
        app = self._app(url)
        async with app.open_async():
            await app.schema_manager.apply_schema_async()
            await app.connector.execute_query_async(FACTS)

    @asynccontextmanager
    async def client(self, url: str) -> AsyncIterator[Ask]:
        app = self._app(url)
        async with app.open_async():
            yield lambda message: app.configure_task("decide").defer_async(message=message)

    async def work(self, url: str, done: dict[str, float], ready: Callable[[], None]) -> None:
        app = self._app(url)

        @app.task(name="decide")
        async def decide(message: str) -> None:
            await app.connector.execute_query_async(FACT, message=message, kind="decided")
            await app.configure_task("perform").defer_async(message=message)

        @app.task(name="perform")
        async def perform(message: str) -> None:
            await app.connector.execute_query_async(FACT, message=message, kind="performed")
            done[message] = time.monotonic()

        async with app.open_async():
            ready()
            await app.run_worker_async(concurrency=AT_ONCE, install_signal_handlers=False)


class Dbos:
    """A workflow of two steps per message, on a queue; its own tables hold the facts."""

    name = "DBOS"
    done_sql = "select count(*) from dbos.workflow_status where status = 'SUCCESS'"

    async def prepare(self, url: str) -> None:
        from dbos import DBOS

        await asyncio.to_thread(DBOS.migrate, url)

    @asynccontextmanager
    async def client(self, url: str) -> AsyncIterator[Ask]:
        from dbos import DBOSClient

        client = DBOSClient(system_database_url=url, system_database_pool_size=POOL)
        try:
            yield lambda message: client.enqueue_async(
                {"queue_name": "bench", "workflow_name": "work", "workflow_id": message}, message
            )
        finally:
            await asyncio.to_thread(client.destroy)

    async def work(self, url: str, done: dict[str, float], ready: Callable[[], None]) -> None:
        from dbos import DBOS

        DBOS(
            config={
                "name": "bench",
                "system_database_url": url,
                "sys_db_pool_size": POOL,
                "use_listen_notify": True,
                "log_level": "WARNING",
            }
        )

        @DBOS.step()
        async def decide(message: str) -> str:
            return "decided"

        @DBOS.step()
        async def perform(message: str) -> str:
            return "performed"

        @DBOS.workflow(name="work")
        async def work(message: str) -> None:
            await decide(message)
            await perform(message)
            done[message] = time.monotonic()

        DBOS.launch()
        await asyncio.to_thread(
            DBOS.register_queue, "bench", worker_concurrency=AT_ONCE, polling_interval_sec=0.01
        )
        ready()
        await asyncio.Event().wait()
