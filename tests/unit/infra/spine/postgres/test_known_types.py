"""Connections share what they know of PostgreSQL's own types, and nothing else."""

import asyncio
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from infra.spine.postgres import known_types
from infra.spine.postgres.known_types import KnownTypes
from tests.kit.postgres import bare_database, execute

pytestmark = pytest.mark.postgres


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The types that asyncpg asked a server for, of a process that knows none yet."""
    found: list[set[int]] = []
    ask = asyncpg.Connection._introspect_types

    async def count(self: Any, typeoids: Sequence[int], timeout: float | None) -> Any:
        found.append(set(typeoids))
        return await ask(self, typeoids, timeout)

    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", count)
    monkeypatch.setattr(known_types, "_known", {})
    return found


async def fetch(url: str, sql: str, *arguments: object) -> Any:
    """The value of a statement on a connection of its own, with a cache for statements and without."""
    values = []
    for size in (100, 0):
        connection = await asyncpg.connect(
            url, connection_class=KnownTypes, statement_cache_size=size
        )
        values.append(await connection.fetchval(sql, *arguments))
        await connection.close()
    assert values[0] == values[1]
    return values[0]


async def test_one_connection_asks_for_all(postgres_url: str, asked: list[set[int]]) -> None:
    for _ in range(2):
        assert await fetch(postgres_url, "select $1::int8[]", [1, 2**40]) == [1, 2**40]
        assert await fetch(
            postgres_url, "select array_agg(x) from unnest($1::jsonb[]) x", ["1"]
        ) == ["1"]
    assert asked == [{1016}, {3807}]


def test_types_of_a_database_are_asked_for_on_each_connection(
    postgres_url: str, asked: list[set[int]]
) -> None:
    for labels in (("sad", "ok"), ("good", "bad")):
        with bare_database(postgres_url) as url:
            asyncio.run(execute(url, f"create type mood as enum {labels}"))
            assert asyncio.run(fetch(url, "select $1::mood[]", labels)) == list(labels)
    assert len(asked) == 4
