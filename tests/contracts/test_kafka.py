"""Kafka with its relay keeps the contract of a bus, alone and with the reconciler behind it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

import pytest

from infra.bus import Reconciled
from infra.database import Database
from infra.kafka.bus import KafkaBus
from infra.kafka.publisher import publishing
from infra.kafka.settings import KafkaSettings
from infra.log import PostgresLog
from infra.notify import Notifier
from infra.ports import Bus
from infra.reconcile import Reconciler
from infra.relay import Relay
from infra.skips import Skips
from tests.contracts.bus_suite import BoundBus, BusSuite

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]


@pytest.fixture
async def notifier(database: Database) -> AsyncIterator[Notifier]:
    async with Notifier(database) as found:
        yield found


@pytest.fixture
def log(database: Database, notifier: Notifier) -> PostgresLog:
    return PostgresLog(database, notifier)


@pytest.fixture
async def relaying(
    database: Database, notifier: Notifier, log: PostgresLog, kafka: KafkaSettings
) -> AsyncIterator[None]:
    """A relay that runs during the test."""
    connect = partial(publishing, kafka)
    relay = Relay(database.url, log, notifier.subscribe(), connect=connect)
    task = asyncio.ensure_future(relay.run())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.usefixtures("relaying")
class TestKafka(BusSuite):
    @pytest.fixture(params=["alone", "reconciled"])
    def bound(
        self,
        request: pytest.FixtureRequest,
        database: Database,
        notifier: Notifier,
        log: PostgresLog,
        kafka: KafkaSettings,
    ) -> BoundBus:
        def make() -> Bus:
            broker = KafkaBus(kafka, log, Skips(database))
            if request.param == "alone":
                return broker
            return Reconciled(broker, Reconciler(log, notifier.subscribe()))

        return BoundBus(log, make)
