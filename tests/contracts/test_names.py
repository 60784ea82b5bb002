"""Both kinds of Names keep the contract."""

import pytest

from infra.names import MemoryNames, Names, PostgresNames
from infra.spine.postgres.pool import Database
from tests.contracts.names_suite import NamesSuite


class TestMemory(NamesSuite):
    @pytest.fixture
    def names(self) -> Names:
        return MemoryNames()


@pytest.mark.postgres
class TestPostgres(NamesSuite):
    @pytest.fixture
    def names(self, database: Database) -> Names:
        return PostgresNames(database)
