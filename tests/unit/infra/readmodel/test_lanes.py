"""Waiting work is counted by lane, with the age of the oldest that may be done."""

from infra.readmodel.platform import PlatformState, oldest_waiting_s
from infra.spine.postgres.pool import Database
from tests.kit.postgres import execute

PLACE = """
insert into effects (id, consumer, stream, lane, run_id, type, data, correlation, due_at, shut)
values (gen_random_uuid(), 'c', 'run-r', '{lane}', 'r', 't', '{{}}', gen_random_uuid(),
        clock_timestamp() + interval '{due}', {shut})
"""


async def test_open_effects_count_with_the_age_of_the_next_due_one(
    database: Database, database_url: str
) -> None:
    for lane, due, shut in (
        ("train", "-90 seconds", False),
        ("train", "-30 seconds", False),
        ("train", "-900 seconds", True),
        ("grade", "60 seconds", False),
    ):
        await execute(database_url, PLACE.format(lane=lane, due=due, shut=shut))
    found = await PlatformState(database).effects()
    assert (found["train"]["waiting"], found["train"]["claimed"]) == (2, 0)
    assert 90 <= (found["train"]["oldest_s"] or 0) < 300
    assert found["grade"]["oldest_s"] is None
    assert 90 <= oldest_waiting_s(found) < 300


async def test_effects_of_a_dead_worker_wait(database: Database, database_url: str) -> None:
    for due in ("-90 seconds", "-30 seconds"):
        await execute(database_url, PLACE.format(lane="train", due=due, shut=False))
    oldest = "due_at < now() - interval '60 s'"
    await execute(database_url, f"update effects set worker = 'dead' where {oldest}")
    found = await PlatformState(database).effects()
    assert (found["train"]["waiting"], found["train"]["claimed"]) == (2, 0)
    assert 90 <= (found["train"]["oldest_s"] or 0) < 300


async def test_an_effect_with_a_later_retry_waits_but_is_not_late(
    database: Database, database_url: str
) -> None:
    for due in ("-5 seconds", "60 seconds"):
        await execute(database_url, PLACE.format(lane="user", due=due, shut=False))
    await execute(database_url, "update effects set later = true")
    found = await PlatformState(database).effects()
    assert found["user"]["waiting"] == 2
    assert 5 <= (found["user"]["oldest_s"] or 0) < 60


async def test_the_database_has_a_size(database: Database) -> None:
    assert await PlatformState(database).database_bytes() > 1_000_000
