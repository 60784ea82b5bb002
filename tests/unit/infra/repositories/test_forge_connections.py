"""Connections keep their secrets sealed, and one secret stays valid while it is replaced."""

import pytest

from infra.identity.secrets.local import LocalKey
from infra.identity.secrets.sealed import Sealer
from infra.repositories.forge_connections import ForgeConnections
from infra.repositories.git.credentials import (
    AppCredential,
    Credential,
    KeyCredential,
    TokenCredential,
)
from infra.spine.postgres.pool import Database
from schemas.errors import InvalidConfig

pytestmark = pytest.mark.postgres

URL = "https://forge.example/o/r"
TOKEN = TokenCredential("git", "hush-token")


@pytest.fixture
def connections(database: Database) -> ForgeConnections:
    return ForgeConnections(database, Sealer(LocalKey(lambda: bytes(32))))


async def test_a_workspace_without_a_connection_has_none(connections: ForgeConnections) -> None:
    assert await connections.get_connection("w") is None
    assert await connections.all_connections() == []
    assert await connections.rotate("w") is None
    await connections.drop("w")


@pytest.mark.parametrize(
    "credential",
    [
        None,
        TOKEN,
        KeyCredential("-----BEGIN"),
        AppCredential("7", "pem"),
        AppCredential("7", "pem", "8"),
    ],
)
async def test_a_stored_connection_is_read_back(
    connections: ForgeConnections, credential: Credential | None
) -> None:
    put = await connections.put_connection("w", forge="github", url=URL, credential=credential)
    assert await connections.get_connection("w") == put
    assert await connections.all_connections() == [put]
    assert (put.forge, put.url, put.hook, put.credential) == ("github", URL, None, credential)
    [secret] = put.secrets
    assert len(secret) == 64


async def test_connecting_again_keeps_secret_credential_and_hook(
    connections: ForgeConnections,
) -> None:
    first = await connections.put_connection("w", forge="gitea", url=URL, credential=TOKEN)
    await connections.set_hook("w", "12")
    again = await connections.put_connection("w", forge="gitea", url=URL)
    assert (again.secrets, again.credential, again.hook) == (first.secrets, TOKEN, "12")
    other = TokenCredential("git", "another")
    changed = await connections.put_connection(
        "w", forge="gitea", url=URL, credential=other, secret="mine"
    )
    assert (changed.secrets, changed.credential, changed.hook) == (("mine",), other, "12")


async def test_another_repository_does_not_get_the_credential(
    connections: ForgeConnections,
) -> None:
    await connections.put_connection("w", forge="gitea", url=URL, credential=TOKEN)
    await connections.set_hook("w", "12")
    moved = await connections.put_connection("w", forge="gitea", url="https://other.example/o/r")
    assert (moved.credential, moved.hook) == (None, None)


async def test_the_secret_before_a_rotation_stays_valid_for_a_day(
    connections: ForgeConnections, database: Database
) -> None:
    first = await connections.put_connection("w", forge="github", url=URL)
    second = await connections.rotate("w")
    assert second is not None
    assert second.secrets[1:] == first.secrets
    assert second.secrets[0] != first.secrets[0]
    left = await database.durable.fetchval(
        "select extract(epoch from previous_until - clock_timestamp())::int / 3600 from connections"
    )
    assert left in (23, 24)
    await database.durable.execute("update connections set previous_until = clock_timestamp()")
    later = await connections.get_connection("w")
    assert later is not None
    assert later.secrets == second.secrets[:1]


async def test_a_rotation_now_drops_the_secrets_before(connections: ForgeConnections) -> None:
    await connections.put_connection("w", forge="github", url=URL)
    await connections.rotate("w")
    found = await connections.rotate("w", now=True)
    assert found is not None
    assert len(found.secrets) == 1


async def test_a_dropped_connection_is_gone(connections: ForgeConnections) -> None:
    kept = await connections.put_connection("x", forge="none", url="/srv/repository")
    await connections.put_connection("w", forge="github", url=URL)
    await connections.drop("w")
    assert await connections.all_connections() == [kept]


async def test_neither_the_table_nor_a_repr_shows_a_secret(
    connections: ForgeConnections, database: Database
) -> None:
    put = await connections.put_connection("w", forge="github", url=URL, credential=TOKEN)
    stored = await database.durable.fetchval("select connections::text from connections")
    for secret in (*put.secrets, TOKEN.token):
        assert secret not in repr(put)
        assert secret not in stored
        assert secret.encode().hex() not in stored


async def test_a_row_moved_to_another_workspace_does_not_open(
    connections: ForgeConnections, database: Database
) -> None:
    await connections.put_connection("w", forge="github", url=URL)
    await database.durable.execute("update connections set workspace = 'x'")
    with pytest.raises(InvalidConfig, match="belongs to another value"):
        await connections.get_connection("x")


async def test_another_key_opens_nothing(connections: ForgeConnections, database: Database) -> None:
    await connections.put_connection("w", forge="github", url=URL)
    other = ForgeConnections(database, Sealer(LocalKey(lambda: b"k" * 32)))
    with pytest.raises(InvalidConfig, match="HEADRACE_SECRET_KEY"):
        await other.get_connection("w")
