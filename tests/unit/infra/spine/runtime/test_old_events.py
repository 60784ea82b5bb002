"""Consumers work on events that an earlier release wrote under another type."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from consumers.sync.consumer import CONSUMER, WorkspaceState
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database
from infra.spine.runtime.hosting import Hosting
from schemas.events import CommitRequested, Event
from schemas.ids import WorkerId, workspace_stream
from schemas.specs import CommitSpec
from tests.kit.commits import commit_of
from tests.kit.old_events import OldRepositoryPushed
from tests.kit.runtimes import runtime_on

pytestmark = pytest.mark.postgres

WS = "w1"
COMMIT = CommitSpec(url="/srv/sums.git")
OLD = OldRepositoryPushed(workspace=WS, workspace_name="sums", commit=COMMIT)
NEW = CommitRequested(workspace=WS, workspace_name="sums", commit=COMMIT)


async def until_effects(database: Database, count: int) -> list[str]:
    """Wait for so many effects, and return the commits that they fetch."""
    async with asyncio.timeout(60):
        while True:
            rows = await database.durable.fetch("select data::text from effects")
            if len(rows) == count:
                return [json.loads(row["data"])["request"] for row in rows]
            await asyncio.sleep(0.02)


async def fold(log: PostgresLog) -> WorkspaceState:
    state: WorkspaceState = CONSUMER.initial
    for recorded in (await log.load({workspace_stream(WS): 0}))[workspace_stream(WS)]:
        state = CONSUMER.evolve(state, cast("Any", recorded.event))
    return state


async def test_requests_of_commits_of_both_types_are_found_and_worked_on(
    database: Database, tmp_path: Path
) -> None:
    async with Notifier(database) as notifier:
        log = PostgresLog(database, notifier)
        events: list[Event] = [OLD, NEW]
        written = [
            recorded
            for version, event in enumerate(events, 1)
            for recorded in await log.commit(commit_of(event, version))
        ]
        rows = await database.durable.fetch("select type from events order by version")
        assert [row["type"] for row in rows] == [OLD.type, NEW.type]
        tailed, _ = await log.tail(Cursor(), limit=10, types=[NEW.type], upto=written[-1].cursor)
        assert [recorded.event for recorded in tailed] == [NEW, NEW]
        assert [recorded.type for recorded in tailed] == [NEW.type, NEW.type]
        assert (await fold(log)).refs.url == COMMIT.url
        worker = WorkerId("w")
        await PostgresEffects(database).register(worker, host="h", pid=1, lease_s=600)
        deciding = Hosting(worker, (replace(CONSUMER, perform=None),), ())
        runtime = runtime_on(database, notifier, deciding, home=tmp_path)
        task = asyncio.ensure_future(runtime.run())
        try:
            found = await until_effects(database, 2)
        finally:
            runtime.stop()
            await task
        assert sorted(found) == sorted(str(recorded.id) for recorded in written)
