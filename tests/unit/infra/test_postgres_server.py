"""The Postgres server that tests and the stack start keeps committed data and is closed to other
users."""

import os
import stat
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.kit.postgres import execute
from tests.stack.postgres import PostgresServer

pytestmark = [pytest.mark.postgres, pytest.mark.processes]


async def test_commits_survive_a_crash(own_server: PostgresServer) -> None:
    await execute(own_server.url, "create table t as select 7 as n")
    own_server.stop("immediate")
    assert not own_server.running
    with pytest.raises(OSError):
        await asyncpg.connect(own_server.url)
    own_server.start()
    assert own_server.running
    connection = await asyncpg.connect(own_server.url)
    assert await connection.fetchval("select n from t") == 7
    await connection.close()


async def test_it_asks_for_its_password_and_is_private(own_server: PostgresServer) -> None:
    password = urlsplit(own_server.url).password
    assert password
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(own_server.url.replace(password, "guessed"))
    for directory in (own_server.directory, own_server.data):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert (own_server.data.stat().st_uid == 0) is False or os.geteuid() != 0
