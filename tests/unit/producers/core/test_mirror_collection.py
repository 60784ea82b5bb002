"""The control process collects the mirrors of workspaces that its database does not know."""

import asyncio
from collections.abc import Container

import pytest

from infra.ports.clock import SystemClock
from infra.postgres.names import PostgresNames
from infra.postgres.pool import Database
from producers.core.mirror_collection import collect_mirrors


async def test_it_collects_at_start_with_the_ids_of_all_workspaces(database: Database) -> None:
    names = PostgresNames(database)
    await names.take("workspace", "a", "id-of-a")
    await names.take("run", "b", "id-of-b")
    seen: list[Container[str]] = []

    async def collect(known: Container[str]) -> int:
        seen.append(known)
        raise OSError("the disk does not answer")

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(30):
            await collect_mirrors(collect, database, SystemClock())
    assert seen == [{"id-of-a"}]
