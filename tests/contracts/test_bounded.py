"""Working tables hold only live rows, however much has gone through them; `bench/b7_growth.py`
shows it for a million events."""

from collections.abc import Sequence

import pytest

from bench import working_tables
from bench.working_tables import measure_growth
from infra.spine.bus.reconciler import BATCH
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.pool import Database
from schemas.ids import ConsumerName

pytestmark = pytest.mark.postgres

EVENTS = 900
MESSAGES = EVENTS // working_tables.EVENTS_EACH


async def test_after_many_events_the_working_tables_hold_what_is_live(database: Database) -> None:
    found = await measure_growth(database, EVENTS)
    left = found.left
    # The consuming transactions of the last page are not below the watermark.
    assert left["inbox"] <= BATCH
    assert (left["effects"], left["workers"], left["watermarks"], left["run_gates"]) == (0, 1, 1, 0)
    assert found.look_reads < 1000


async def test_twin_with_rows_that_are_kept_the_inbox_grows_with_the_log(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = PostgresLog.advance

    async def keeping(log: PostgresLog, consumers: Sequence[ConsumerName], cursor: Cursor) -> None:
        await advance(log, consumers, Cursor(0, 0))
        await log._lazy.execute(
            "update watermarks set xid = $2, position = $3 where consumer = any ($1)",
            list(consumers),
            cursor.xid,
            cursor.position,
        )

    monkeypatch.setattr(PostgresLog, "advance", keeping)
    found = await measure_growth(database, EVENTS)
    assert found.left["inbox"] >= MESSAGES
