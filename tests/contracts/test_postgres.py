"""Postgres keeps every contract: the embedded one, and an older server."""

from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from infra.spine.bus.embedded import EmbeddedBus
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import ROOT, Queries
from schemas.ids import WorkerId
from tests.contracts.bus_suite import BoundBus, BusSuite
from tests.contracts.effects_suite import Bound, EffectsSuite
from tests.contracts.event_log_suite import EventLogSuite, warning

pytestmark = pytest.mark.postgres

QUERIES = (ROOT / "infra/spine/postgres/sql/event_log.sql").read_text()


@pytest.fixture(scope="module", params=["embedded", "server"])
def postgres_url(request: pytest.FixtureRequest) -> str:
    """Every test here runs on both servers."""
    name = "server_url" if request.param == "server" else "embedded_url"
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture
async def notifier(database: Database) -> AsyncIterator[Notifier]:
    async with Notifier(database) as found:
        yield found


@pytest.fixture
def log(database: Database, notifier: Notifier) -> PostgresLog:
    return PostgresLog(database, notifier)


class TestLog(EventLogSuite):
    async def test_twin_without_what_the_log_knows_it_is_appended_twice(
        self, log: PostgresLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forgetful = QUERIES.replace(
            "id = any ($1) and causation = correlation", "id = any ($1) and false"
        )
        assert forgetful != QUERIES
        monkeypatch.setattr("infra.spine.postgres.event_log.SQL", Queries("event_log", forgetful))
        event, cause = warning("twice", 1), uuid4()
        for _ in range(2):
            await log.append([event], cause=cause)
        assert (await log.versions([event.stream]))[event.stream] == 2


class TestEffects(EffectsSuite):
    @pytest.fixture
    def bound(self, database: Database, log: PostgresLog) -> Bound:
        effects = PostgresEffects(database)

        async def expire_lease(seconds: float, worker: WorkerId) -> None:
            await database.durable.execute(
                "update workers set expires_at = clock_timestamp() where id = $1", worker
            )

        return Bound(log, effects, expire_lease)


class TestBus(BusSuite):
    @pytest.fixture
    def bound(self, log: PostgresLog, notifier: Notifier) -> BoundBus:
        return BoundBus(log, lambda: EmbeddedBus(log, notifier))
