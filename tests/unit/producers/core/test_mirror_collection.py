"""The control process collects the mirrors of workspaces that its database does not know."""

import asyncio
from collections.abc import Container

from infra.names import PostgresNames
from infra.spine.ports.clock import SystemClock
from infra.spine.postgres.pool import Database
from producers.core.repositories.mirror_collection import collect_mirrors


async def test_it_collects_at_start_with_the_ids_of_all_workspaces(database: Database) -> None:
    names = PostgresNames(database)
    await names.take("workspace", "a", "id-of-a")
    await names.take("run", "b", "id-of-b")
    seen: asyncio.Queue[Container[str]] = asyncio.Queue()

    async def collect(known: Container[str]) -> int:
        seen.put_nowait(known)
        raise OSError("the disk does not answer")

    collecting = asyncio.create_task(collect_mirrors(collect, database, SystemClock()))
    assert await asyncio.wait_for(seen.get(), 60) == {"id-of-a"}
    _, still = await asyncio.wait({collecting}, timeout=0.2)
    assert still, "a disk that does not answer ended the collection for good"
    collecting.cancel()
    assert seen.empty()
