"""Which waiters are woken by which change: performers when an effect may be claimable, readers when
the log grew."""

from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from infra.spine.ports.effects import NewEffect
from infra.spine.ports.event_log import Commit
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import News, Notifier, Wakeup
from infra.spine.postgres.pool import Database
from schemas.events import RunPaused, RunWarned
from schemas.ids import ConsumerName, StreamName, WorkerId
from tests.kit.commits import commit_of
from tests.kit.hosting import effect

pytestmark = pytest.mark.postgres

HERE = WorkerId("here")


class Elsewhere:
    """Another process that waits for both kinds of notification."""

    def __init__(self, notifier: Notifier) -> None:
        self._log = notifier.subscribe(News.LOG)
        self._work = notifier.subscribe(News.WORK)

    async def hears(self, news: News) -> bool:
        """Wait for these notifications; return whether no others came."""
        kinds = {News.LOG: self._log, News.WORK: self._work}
        await kinds.pop(news).wait(60)
        [other] = kinds.values()
        return not _set(other)

    async def begin(self) -> None:
        """Start listening, and discard the notifications of the start itself."""
        for wakeup in (self._log, self._work):
            await wakeup.wait(60)


def _set(wakeup: Wakeup) -> bool:
    return wakeup._event.is_set()


@pytest.fixture
async def elsewhere(database: Database) -> AsyncIterator[Elsewhere]:
    async with Notifier(database) as notifier:
        found = Elsewhere(notifier)
        await found.begin()
        yield found


def asked(*, claimed: bool) -> NewEffect:
    return NewEffect(
        effect=effect(uuid4().hex, 1),
        consumer=ConsumerName("bench"),
        stream=StreamName("checkpoint-r"),
        correlation=uuid4(),
        claimed=claimed,
    )


async def test_performers_sleep_through_what_leaves_nothing_to_claim(
    database: Database, elsewhere: Elsewhere
) -> None:
    async with Notifier(database) as notifier:
        log = PostgresLog(database, notifier)
        born = Commit(worker=HERE, effects=(asked(claimed=True),))
        await log.commit(born)
        await log.commit(commit_of(RunWarned(run="r", step=1, message="look")))
        assert await elsewhere.hears(News.LOG)
        waiting = Commit(effects=(asked(claimed=True), asked(claimed=False)), worker=HERE)
        await log.commit(waiting)
        assert await elsewhere.hears(News.WORK)


async def test_a_gate_that_moves_wakes_both(database: Database, elsewhere: Elsewhere) -> None:
    async with Notifier(database) as notifier:
        log = PostgresLog(database, notifier)
        await log.commit(commit_of(RunPaused(run="r", step=1)))
        await elsewhere.hears(News.LOG)
        assert await elsewhere.hears(News.WORK), "the news of the log were heard already"
