"""Both records of judgements keep the contract."""

import pytest

from infra.model_api.judgements import MemoryJudgements, PostgresJudgements
from infra.ports.judges import JudgementRecord
from infra.spine.postgres.pool import Database
from tests.contracts.judgements_suite import GOOD, NOTHING, JudgementsSuite


class TestMemory(JudgementsSuite):
    @pytest.fixture
    def record(self) -> JudgementRecord:
        return MemoryJudgements()


@pytest.mark.postgres
class TestPostgres(JudgementsSuite):
    @pytest.fixture
    def record(self, database: Database) -> JudgementRecord:
        return PostgresJudgements(database)

    async def test_they_go_with_the_history_of_their_run(
        self, database: Database, record: JudgementRecord
    ) -> None:
        for owner in ("r1", "r2"):
            await record.record(owner, {"k1": GOOD})
            await record.reserve(owner, NOTHING)
        await database.durable.execute("insert into removals (owner) values ('r1')")
        assert await record.find_judgements("r1", ["k1"]) == {}
        assert (await record.usage("r1")).calls == 0
        assert await record.find_judgements("r2", ["k1"]) == {"k1": GOOD}
        assert (await record.usage("r2")).calls == 1
