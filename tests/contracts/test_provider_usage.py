"""Both records of the use of providers' models keep the contract."""

import pytest

from infra.model_api.provider_usage import MemoryProviderUsage, PostgresProviderUsage
from infra.ports.provider_usage import ProviderUsage
from infra.spine.postgres.pool import Database
from tests.contracts.provider_usage_suite import ProviderUsageSuite, provider_of


class TestMemory(ProviderUsageSuite):
    @pytest.fixture
    def usage(self) -> ProviderUsage:
        return MemoryProviderUsage()

    @pytest.fixture
    def another(self, usage: ProviderUsage) -> ProviderUsage:
        return usage


@pytest.mark.postgres
class TestPostgres(ProviderUsageSuite):
    @pytest.fixture
    def usage(self, database: Database) -> ProviderUsage:
        return PostgresProviderUsage(database)

    @pytest.fixture
    def another(self, usage: ProviderUsage, database: Database) -> ProviderUsage:
        return PostgresProviderUsage(database)

    async def test_it_goes_with_the_history_of_its_owner(
        self, database: Database, usage: ProviderUsage
    ) -> None:
        provider = provider_of(max_calls=1)
        assert await usage.begin(provider) is None
        assert await usage.begin(provider) is not None
        await database.durable.execute("insert into removals (owner) values ('e1')")
        assert await usage.begin(provider) is None
