"""A connection that the server has ended, but whose end has not arrived yet, counts as lost and is
dropped."""

import struct

import pytest

from infra.spine.postgres.errors import DatabaseUnavailable
from infra.spine.postgres.pool import connect

pytestmark = pytest.mark.postgres

FIELDS = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to unexpected postmaster exit\0\0"
ENDED = b"E" + struct.pack("!i", 4 + len(FIELDS)) + FIELDS
"""The last message of a server (protocol 3.0, ErrorResponse); only the end of the stream
follows."""


async def test_the_next_call_is_away_and_the_one_after_it_gets_a_new_connection(
    database_url: str,
) -> None:
    async with connect(database_url, size=1) as database:
        async with database.durable.acquire() as connection:
            pid = await connection.fetchval("select pg_backend_pid()")
            connection._con._protocol.data_received(ENDED)
        with pytest.raises(DatabaseUnavailable):
            await database.durable.fetchval("select 1")
        assert await database.durable.fetchval("select pg_backend_pid()") != pid
