"""Both stores of secrets keep the contract."""

import pytest

from infra.identity.secrets.local import LocalKey
from infra.identity.secrets.memory import MemorySecrets
from infra.identity.secrets.sealed import Sealer
from infra.identity.secrets.store import PostgresSecrets
from infra.ports.secrets import SecretOwner, SecretStore
from infra.spine.postgres.pool import Database
from schemas.errors import InvalidConfig
from schemas.secrets.secret_value import SecretValue
from tests.contracts.secrets_suite import SecretsSuite

ANN = SecretOwner("personal", "ann")
OLD, NEW = LocalKey(lambda: b"o" * 32), LocalKey(lambda: b"n" * 32)


class TestMemory(SecretsSuite):
    @pytest.fixture
    def store(self) -> SecretStore:
        return MemorySecrets()


@pytest.mark.postgres
class TestPostgres(SecretsSuite):
    @pytest.fixture
    def store(self, database: Database) -> SecretStore:
        return PostgresSecrets(database, Sealer(OLD))

    async def test_the_table_holds_no_value(self, database: Database, store: SecretStore) -> None:
        await store.put_secret(ANN, "KEY", SecretValue("hush-hush-1"), by="a")
        [row] = await database.durable.fetch("select s::text as whole, sealed from secrets s")
        assert b"hush" not in bytes(row["sealed"])
        assert "hush" not in row["whole"]

    async def test_a_value_that_is_moved_does_not_open(
        self, database: Database, store: SecretStore
    ) -> None:
        await store.put_secret(ANN, "KEY", SecretValue("hush-hush-1"), by="a")
        await database.durable.execute("update secrets set owner = 'eve'")
        with pytest.raises(InvalidConfig):
            await store.resolve(["KEY"], workspace=None, submitter="eve")

    async def test_a_worker_uses_a_value_for_a_moment(self, database: Database) -> None:
        """The twin without a moment shows the new value at once."""
        store = PostgresSecrets(database, Sealer(OLD))
        cached = PostgresSecrets(database, Sealer(OLD), cache_s=60)
        request = {"workspace": None, "submitter": "ann"}
        for value, seen in (("hush-hush-1", "hush-hush-1"), ("hush-hush-2", "hush-hush-1")):
            await store.put_secret(ANN, "KEY", SecretValue(value), by="a")
            assert (await store.resolve(["KEY"], **request))["KEY"].reveal() == value
            assert (await cached.resolve(["KEY"], **request))["KEY"].reveal() == seen
        assert await cached.resolve(["KEY"], workspace=None, submitter="bob") == {}
        brief = PostgresSecrets(database, Sealer(OLD), cache_s=1e-6)
        await brief.resolve(["KEY"], **request)
        await store.delete(ANN, "KEY")
        assert await brief.resolve(["KEY"], **request) == {}

    async def test_a_key_is_replaced_without_touching_the_values(self, database: Database) -> None:
        before = PostgresSecrets(database, Sealer(OLD))
        await before.put_secret(ANN, "KEY", SecretValue("hush-hush-1"), by="a")
        after = PostgresSecrets(database, Sealer(NEW))
        with pytest.raises(InvalidConfig, match="HEADRACE_SECRET_KEYS_OLD"):
            await after.resolve(["KEY"], workspace=None, submitter="ann")
        both = PostgresSecrets(database, Sealer(NEW, lambda: [OLD]))
        assert await both.rewrap() == 1
        found = await after.resolve(["KEY"], workspace=None, submitter="ann")
        assert found["KEY"].reveal() == "hush-hush-1"
        assert [one.key for one in await after.all_secrets([ANN])] == [await NEW.key_id()]
        with pytest.raises(InvalidConfig):
            await before.resolve(["KEY"], workspace=None, submitter="ann")
