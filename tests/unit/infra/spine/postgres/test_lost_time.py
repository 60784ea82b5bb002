"""The time that a dead worker's effects lost: by the clock of the database, each second once."""

from uuid import uuid4

import pytest

from infra.spine.ports.event_log import Commit
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database
from schemas.effects import Lane
from schemas.ids import WorkerId
from tests.contracts.effects_suite import SYNC, effect

pytestmark = pytest.mark.postgres


async def test_the_effects_of_a_dead_worker_share_its_device_until_the_end_of_its_lease(
    database: Database,
) -> None:
    asked = [effect(uuid4().hex, claimed=True) for _ in range(3)]
    dead, heir, effects = WorkerId("dead"), WorkerId("heir"), PostgresEffects(database)
    async with Notifier(database) as notifier:
        log = PostgresLog(database, notifier)
        for name in (dead, heir):
            await effects.register(name, host="h", pid=1, lease_s=60)
        await log.commit(Commit(worker=dead, effects=tuple(asked)))
    await database.durable.execute(
        "update effects set claimed_at = clock_timestamp() - interval '100 s',"
        " lane = case when id = $1 then 'control' else 'train' end",
        asked[0].effect.id,
    )
    await database.durable.execute(
        "update workers set expires_at = clock_timestamp() - interval '40 s' where id = 'dead'"
    )
    room = {Lane.TRAIN: 9, Lane.CONTROL: 9}
    taken = await effects.claim(heir, room=room, consumers=[SYNC])
    lost = {one.id: one.wasted_s for one in taken}
    assert [lost[one.effect.id] for one in asked] == pytest.approx([60, 30, 30], abs=0.5)
    again = await effects.claim(heir, room=room, consumers=[SYNC])
    assert not again


async def test_a_clock_that_went_back_wastes_nothing(database: Database) -> None:
    asked = effect(uuid4().hex, claimed=True)
    dead, heir, effects = WorkerId("dead"), WorkerId("heir"), PostgresEffects(database)
    async with Notifier(database) as notifier:
        for name in (dead, heir):
            await effects.register(name, host="h", pid=1, lease_s=60)
        await PostgresLog(database, notifier).commit(Commit(worker=dead, effects=(asked,)))
    await database.durable.execute(
        "update effects set claimed_at = clock_timestamp() + interval '1 h'"
    )
    await effects.expire(dead)
    [taken] = await effects.claim(heir, room={Lane.CONTROL: 9}, consumers=[SYNC])
    assert taken.wasted_s == 0
