"""Waiting work is counted by lane, with the age of the oldest that may be done."""

from infra.postgres.pool import Database
from infra.readmodel.platform import PlatformState
from tests.kit.postgres import execute

PLACE = """
insert into effects (id, consumer, stream, lane, run_id, type, data, correlation, due_at, shut)
values (gen_random_uuid(), 'c', 'run-r', '{lane}', 'r', 't', '{{}}', gen_random_uuid(),
        clock_timestamp() + interval '{due}', {shut})
"""


async def test_the_oldest_that_is_due_and_not_shut_counts(
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
    assert (found["train"]["waiting"], found["train"]["claimed"]) == (3, 0)
    assert 90 <= (found["train"]["oldest_s"] or 0) < 300
    assert found["grade"]["oldest_s"] is None


async def test_the_database_has_a_size(database: Database) -> None:
    assert await PlatformState(database).database_bytes() > 1_000_000
