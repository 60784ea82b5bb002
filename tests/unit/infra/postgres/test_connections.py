"""Connections keep their secrets sealed, and one secret stays valid while it is replaced."""

import pytest

from infra.git.credentials import AppCredential, Credential, KeyCredential, TokenCredential
from infra.postgres.connections import Connections
from infra.postgres.keys.local import LocalKey
from infra.postgres.keys.sealed import Sealer
from infra.postgres.pool import Database
from schemas.errors import InvalidConfig

pytestmark = pytest.mark.postgres

URL = "https://forge.example/o/r"
TOKEN = TokenCredential("git", "hush-token")


@pytest.fixture
def connections(database: Database) -> Connections:
    return Connections(database, Sealer(LocalKey(lambda: bytes(32))))


async def test_a_workspace_without_a_connection_has_none(connections: Connections) -> None:
    assert await connections.get("w") is None
    assert await connections.all() == []
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
async def test_what_is_put_is_read(connections: Connections, credential: Credential | None) -> None:
    put = await connections.put("w", provider="github", url=URL, credential=credential)
    assert await connections.get("w") == put
    assert await connections.all() == [put]
    assert (put.provider, put.url, put.hook, put.credential) == ("github", URL, None, credential)
    [secret] = put.secrets
    assert len(secret) == 64


async def test_connecting_again_keeps_secret_credential_and_hook(connections: Connections) -> None:
    first = await connections.put("w", provider="gitea", url=URL, credential=TOKEN)
    await connections.set_hook("w", "12")
    again = await connections.put("w", provider="gitea", url=URL)
    assert (again.secrets, again.credential, again.hook) == (first.secrets, TOKEN, "12")
    other = TokenCredential("git", "another")
    changed = await connections.put("w", provider="gitea", url=URL, credential=other, secret="mine")
    assert (changed.secrets, changed.credential, changed.hook) == (("mine",), other, "12")


async def test_another_repository_does_not_get_the_credential(connections: Connections) -> None:
    await connections.put("w", provider="gitea", url=URL, credential=TOKEN)
    await connections.set_hook("w", "12")
    moved = await connections.put("w", provider="gitea", url="https://other.example/o/r")
    assert (moved.credential, moved.hook) == (None, None)


async def test_the_secret_before_a_rotation_stays_valid_for_a_day(
    connections: Connections, database: Database
) -> None:
    first = await connections.put("w", provider="github", url=URL)
    second = await connections.rotate("w")
    assert second is not None
    assert second.secrets[1:] == first.secrets
    assert second.secrets[0] != first.secrets[0]
    left = await database.durable.fetchval(
        "select extract(epoch from previous_until - clock_timestamp())::int / 3600 from connections"
    )
    assert left in (23, 24)
    await database.durable.execute("update connections set previous_until = clock_timestamp()")
    later = await connections.get("w")
    assert later is not None
    assert later.secrets == second.secrets[:1]


async def test_a_rotation_now_drops_the_secrets_before(connections: Connections) -> None:
    await connections.put("w", provider="github", url=URL)
    await connections.rotate("w")
    found = await connections.rotate("w", now=True)
    assert found is not None
    assert len(found.secrets) == 1


async def test_a_dropped_connection_is_gone(connections: Connections) -> None:
    kept = await connections.put("x", provider="none", url="/srv/repository")
    await connections.put("w", provider="github", url=URL)
    await connections.drop("w")
    assert await connections.all() == [kept]


async def test_neither_the_table_nor_a_repr_shows_a_secret(
    connections: Connections, database: Database
) -> None:
    put = await connections.put("w", provider="github", url=URL, credential=TOKEN)
    stored = await database.durable.fetchval("select connections::text from connections")
    for secret in (*put.secrets, TOKEN.token):
        assert secret not in repr(put)
        assert secret not in stored
        assert secret.encode().hex() not in stored


async def test_a_row_moved_to_another_workspace_does_not_open(
    connections: Connections, database: Database
) -> None:
    await connections.put("w", provider="github", url=URL)
    await database.durable.execute("update connections set workspace = 'x'")
    with pytest.raises(InvalidConfig, match="belongs to another value"):
        await connections.get("x")


async def test_another_key_opens_nothing(connections: Connections, database: Database) -> None:
    await connections.put("w", provider="github", url=URL)
    other = Connections(database, Sealer(LocalKey(lambda: b"k" * 32)))
    with pytest.raises(InvalidConfig, match="HEADRACE_SECRET_KEY"):
        await other.get("w")
