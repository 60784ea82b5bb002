"""Many records go in about linear time, several processes share the work, and what is only a row of the
database goes too."""

import asyncio
import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from infra.operations.maintenance import records
from infra.operations.maintenance.archive import call_removal
from infra.operations.maintenance.records import EVALUATIONS, OTHERS, ROWS
from infra.spine.postgres.pool import administering
from schemas.events import MessageDeadLettered, MessageRedriven
from schemas.ids import dead_letter_stream, run_stream
from tests.kit.application import Application, rows
from tests.unit.consumers.deploy.test_deploy import served
from tests.unit.producers.http.routes.test_records import (
    append,
    assert_sound,
    evaluation,
    later,
    remove,
    stored,
    types_in,
)

pytestmark = pytest.mark.postgres

OLD = datetime(2020, 1, 1, tzinfo=UTC)

FILL = """
with made as (
    insert into events (xid, id, stream, version, type, schema_version, data, run_id, correlation, time)
    select '5', gen_random_uuid(), 'verify-v' || n, 1, 'rl.verification.completed', 1, '{}', 'v' || n,
           gen_random_uuid(), '2020-01-01'::timestamptz + n * interval '1 second'
    from generate_series(1, $1::integer) n returning stream
)
insert into streams select stream, 1 from made
"""


async def buffers(app: Application, statement: str) -> int:
    """How many pages of the database a statement looks at."""
    async with administering(app.database.url) as admin:
        plan = await admin.fetchval(f"explain (analyze, buffers, format json) {statement}")
    top = json.loads(plan)[0]["Plan"]
    return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])


async def test_a_record_among_many_costs_no_more_pages(app: Application) -> None:
    await append(app, *evaluation("young"))
    each = []
    for number in (100, 1500):
        async with administering(app.database.url) as admin:
            await admin.execute("analyze")
            await admin.execute(FILL.replace("$1", str(number)))
        statement = (
            "select remove_page('verifications', 'rl.verification.completed', now(), '-infinity', 0,"
            " 100)"
        )
        each.append(await buffers(app, statement) / 100)
    assert each[1] < 1.5 * each[0] < 600, each


@pytest.mark.parametrize("kinds", [(EVALUATIONS,), ("dead_letters",)])
async def test_removers_at_once_share_the_records(
    app: Application, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    monkeypatch.setattr(records, "AT_ONCE", 3)
    if kinds == (EVALUATIONS,):
        for number in range(12):
            await append(app, *evaluation(f"e{number}"))
    else:
        await append_letters(app, redriven=12, waiting=1)
    found = await app.services.records.count(kinds, before=later())
    answers = await asyncio.gather(
        *(app.services.records.remove(kinds, before=later()) for _ in range(3))
    )
    assert sum(sum(one.values()) for one in answers) == sum(found.values()) == 12
    await assert_sound(app)


async def test_a_record_that_another_process_removes_is_not_waited_for(app: Application) -> None:
    await append(app, *evaluation("one"), *evaluation("two"))
    async with administering(app.database.url) as other, other.transaction():
        await other.execute("select from streams where stream = 'eval-one' for update")
        answer = app.services.records.remove((EVALUATIONS,), before=later())
        assert await asyncio.wait_for(answer, 20) == {EVALUATIONS: 1}
    assert await remove(app, EVALUATIONS) == {EVALUATIONS: 1}


async def test_a_page_that_two_processes_need_at_once_is_tried_again(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    await append(app, *evaluation("one"))
    call, calls = call_removal, 0

    async def fail_once(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise asyncpg.DeadlockDetectedError
        return await call(*arguments)

    monkeypatch.setattr(records, "call_removal", fail_once)
    assert await remove(app, EVALUATIONS) == {EVALUATIONS: 1}


async def append_letters(app: Application, *, redriven: int, waiting: int) -> list[str]:
    """Append dead letters that were delivered again, and then some that wait; returns their ids."""
    letters = []
    for number in range(redriven + waiting):
        letter = MessageDeadLettered(
            consumer="learn",
            message_id=uuid4(),
            message_type="rl.run.started",
            about="r1",
            cause="x",
            payload="{}",
            pauses=True,
        )
        await append(app, letter)
        letters.append((await stored_letters(app))[-1])
        if number < redriven:
            again = MessageRedriven(
                consumer="learn",
                letter=UUID(letters[-1]),
                message_id=letter.message_id,
                message_stream=run_stream("r1"),
                message_version=1,
                about="r1",
                paused=True,
            )
            await append(app, again)
    return letters


async def stored_letters(app: Application) -> list[str]:
    found = await app.database.durable.fetch("select letter from dead_letters order by version")
    return [row["letter"] for row in found]


async def test_dead_letters_go_once_they_are_redriven(app: Application) -> None:
    *_, waiting = await append_letters(app, redriven=2, waiting=1)
    assert await remove(app, "dead_letters") == {"dead_letters": 2}
    assert await stored_letters(app) == [waiting]
    assert await types_in(app, dead_letter_stream("learn")) == [MessageDeadLettered.type]
    assert (await app.get("/dead-letters", all="true"))["total_count"] == 1
    await assert_sound(app)
    assert await stored_letters(app) == [waiting]
    assert await stored(app, "log_lines")


async def test_told_alerts_go_and_what_was_told_stays_marked(app: Application) -> None:
    await app.database.durable.execute(
        "insert into alerts (run, kind, channel, content, sent_at, due_at, created_at) values"
        " ('r1', 'ended', '', '', $1, $1, $1), ('r1', 'ended', 'mail', 'c', $1, $1, $1),"
        " ('r2', 'ended', 'mail', 'given up', null, 'infinity', $1),"
        " ('r3', 'ended', 'mail', 'waits', null, $1, $1),"
        " ('r4', 'ended', 'mail', 'young', now() + interval '1 hour', $1, now() + interval '1 hour')",
        OLD,
    )
    assert await remove(app, "alerts") == {"alerts": 2}
    left = await app.database.durable.fetch("select run, content from alerts order by run, content")
    assert [tuple(row) for row in left] == [("r1", ""), ("r3", "waits"), ("r4", "young")]


async def test_uploads_that_became_no_dataset_go(app: Application) -> None:
    assert (await app.upload("good", rows(20))).status_code == 200
    assert (await app.upload("bad", "not json\n")).status_code == 400
    assert await remove(app, "uploads") == {"uploads": 1}
    assert [one["name"] for one in (await app.get("/datasets"))["datasets"]] == ["good"]
    assert (await app.upload("bad", rows(21))).status_code == 200


async def test_use_of_long_ago_is_added_up(app: Application) -> None:
    await app.database.durable.execute(
        "insert into inference_usage (api_key, model, day, requests, prompt_tokens, completion_tokens,"
        " last_at) values ('k', $2, '2020-01-01', 1, 10, 100, $1), ('k', $2, '2020-01-02', 2, 20, 200,"
        " $1), ('l', $2, '2020-01-01', 4, 40, 400, $1), ('k', $2, '2999-01-01', 8, 80, 800, $1)",
        OLD,
        served(3).full_name,
    )
    before = await app.services.readmodel.deployments.usage(served(3))
    assert await remove(app, "usage") == {"usage": 3}
    assert len(await stored(app, "inference_usage")) == 3
    assert await app.services.readmodel.deployments.usage(served(3)) == before
    assert await remove(app, "usage") == {"usage": 0}


async def test_processes_remove_rows_with_their_own_rights(app: Application) -> None:
    """Only the removal of events needs those of the owner."""
    for kind in ROWS:
        assert (
            await app.database.durable.fetchval("select remove_old_rows($1, now(), 1)", kind) == 0
        )
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await app.database.durable.execute("select remove_owner('r1')")
    assert set(ROWS) < set(OTHERS)


async def test_a_process_of_the_version_before_removes_too(app: Application) -> None:
    await append(app, *evaluation("one"), *evaluation("two"))
    await append_letters(app, redriven=1, waiting=1)
    call = "select remove_records($1, now(), $2, 1000)"
    ask = app.database.durable.fetchval
    assert [await ask(call, EVALUATIONS, owner) for owner in ("one", "one", None, None)] == [
        1,
        0,
        1,
        0,
    ]
    await assert_sound(app)
