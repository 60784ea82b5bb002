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

    async def test_the_table_of_a_runs_secrets_holds_no_value(
        self, database: Database, store: SecretStore
    ) -> None:
        await store.give("r1", {"KEY": SecretValue("hush-hush-1")})
        [row] = await database.durable.fetch("select s::text as whole, sealed from run_secrets s")
        assert b"hush" not in bytes(row["sealed"])
        assert "hush" not in row["whole"]
        await database.durable.execute("update run_secrets set owner = 'r2'")
        with pytest.raises(InvalidConfig):
            await store.resolve(["KEY"], workspace=None, submitter=None, run="r2")

    async def test_a_secret_of_no_run_is_taken_back(self, database: Database) -> None:
        """The twin that looks too early, and runs that go on, keep theirs."""
        store, nobody = (
            PostgresSecrets(database, Sealer(OLD)),
            {"workspace": None, "submitter": None},
        )
        for run in ("never-requested", "ended", "going"):
            await store.give(run, {"KEY": SecretValue("hush-hush-1")})
        for run, status in (("ended", "finished"), ("going", "running")):
            await database.durable.execute(
                "insert into runs (run, name, status, phase, algorithm, execution_mode, model, dataset,"
                " config, dataset_ref, created_at, last_at) values ($1, $1, $2, 'train', 'grpo', 'sync',"
                " 'm', 'd', '{}', '{}', now(), now())",
                run,
                status,
            )
        await store.take_left_back(left_s=60)
        assert await database.durable.fetchval("select count(*) from run_secrets") == 3
        await store.take_left_back(left_s=0)
        left = await database.durable.fetch("select owner from run_secrets")
        assert [row["owner"] for row in left] == ["going"]
        assert await store.resolve(["KEY"], **nobody, run="going")

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
        await before.give("r1", {"KEY": SecretValue("hush-hush-2")})
        after = PostgresSecrets(database, Sealer(NEW))
        with pytest.raises(InvalidConfig, match="HEADRACE_SECRET_KEYS_OLD"):
            await after.resolve(["KEY"], workspace=None, submitter="ann")
        both = PostgresSecrets(database, Sealer(NEW, lambda: [OLD]))
        assert await both.rewrap() == 2
        own = await after.resolve(["KEY"], workspace=None, submitter=None, run="r1")
        assert own["KEY"].reveal() == "hush-hush-2"
        found = await after.resolve(["KEY"], workspace=None, submitter="ann")
        assert found["KEY"].reveal() == "hush-hush-1"
        assert [one.key for one in await after.all_secrets([ANN])] == [await NEW.key_id()]
        with pytest.raises(InvalidConfig):
            await before.resolve(["KEY"], workspace=None, submitter="ann")
