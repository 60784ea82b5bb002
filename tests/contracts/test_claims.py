"""The cost of a claim depends on the effects that it takes, however many other effects wait in
other lanes, for a later time, with other workers, or for paused runs. The server counts the rows
that it read for a claim."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest

from infra.spine.ports.effects import Claimed, NewEffect
from infra.spine.ports.event_log import Commit, NewEvent
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database
from schemas.effects import FetchCommit, Lane
from schemas.events import CheckpointFailed, Event, RunPaused, RunResumed
from schemas.ids import ConsumerName, EventId, StreamName, WorkerId, checkpoint_stream
from schemas.specs import CommitSpec
from tests.kit.hosting import effect
from tests.kit.postgres import execute

pytestmark = pytest.mark.postgres

EACH = 5_000
ME, HEIR = WorkerId("me"), WorkerId("heir")
MINE = ConsumerName("sync")

WAITS = ("control", "sync", "null", "clock_timestamp()")
OTHERS = (
    ("user", "sync", "null", "clock_timestamp()"),  # another lane
    ("control", "checkpoint", "null", "clock_timestamp()"),  # another consumer
    ("control", "sync", "null", "clock_timestamp() + interval '1 hour'"),  # later
    ("control", "sync", "'busy' || n % 50", "clock_timestamp()"),  # held
)

READ = """
select (select sum(pg_stat_get_xact_tuples_returned(indexrelid)) from pg_index
        where indrelid = 'effects'::regclass)
     + pg_stat_get_xact_tuples_returned('effects'::regclass)
     + pg_stat_get_xact_tuples_fetched('effects'::regclass)
"""
"""Entries of the indexes and rows of the table that this transaction has read."""


def rows(lane: str, consumer: str, worker: str, due: str, run: str = "'r' || n % 100") -> str:
    """Effects of one kind, of a hundred runs."""
    effect = FetchCommit(
        workspace="w",
        request=UUID(int=0),
        commit=CommitSpec(url="/nowhere"),
        entrypoints=(),
        requester="run-r",
    ).model_dump_json()
    return (
        "insert into effects (id, consumer, stream, lane, run_id, type, data, correlation, worker,"
        f" due_at, later) select gen_random_uuid(), '{consumer}', 'workspace-w', '{lane}', {run},"
        f" 'FetchCommit', '{effect}', gen_random_uuid(), {worker}, {due}, {due} > clock_timestamp()"
        f" from generate_series(1, {EACH}) n;"
    )


LEASE = (
    "insert into workers (id, host, pid, expires_at) select {who}, 'h', 1, now() + interval '1 day'"
)


@pytest.fixture
async def crowded(database: Database) -> Database:
    """Twenty-five thousand effects, a fifth of them for our worker. Nothing was analyzed since the
    table was empty, as in the first minute of a large run."""
    for name in (ME, HEIR):
        await execute(database.url, LEASE.format(who=f"'{name}'"))
    busy = LEASE.format(who="'busy' || n") + " from generate_series(0, 49) n"
    await execute(database.url, "alter table effects set (autovacuum_enabled = off);" + busy)
    await execute(database.url, "".join(rows(*kind) for kind in (*OTHERS, WAITS)))
    return database


async def read_for(
    database: Database, limit: int, *, worker: WorkerId = ME
) -> tuple[int, Sequence[Claimed]]:
    """Claim this many effects, and return them with the number of rows that were read."""
    async with database.durable.acquire() as connection, connection.transaction():
        effects = PostgresEffects(database)
        effects._pool = connection
        before = await connection.fetchval(READ)
        claimed = await effects.claim(worker, room={Lane.CONTROL: limit}, consumers=[MINE])
        return int(await connection.fetchval(READ) - before), claimed


async def test_a_claim_reads_what_it_takes(crowded: Database) -> None:
    one, few = await read_for(crowded, 1)
    assert len(few) == 1
    many, claimed = await read_for(crowded, 100)
    assert len(claimed) == 100
    assert not {c.id for c in few} & {c.id for c in claimed}
    # 50 holders are asked for twice; what is taken is met in two indexes and the table.
    assert one < 500
    assert many < one + 100 * 6


async def test_a_claim_that_finds_nothing_reads_next_to_nothing(crowded: Database) -> None:
    _, claimed = await read_for(crowded, 2 * EACH)
    assert len(claimed) == EACH
    await execute(crowded.url, "vacuum effects")
    read, claimed = await read_for(crowded, 100)
    assert list(claimed) == []
    assert read < 500
    later = await PostgresEffects(crowded).next_due_s(ME, lanes=[Lane.CONTROL], consumers=[MINE])
    assert later is not None
    assert 3000 < later < 3600


async def test_dead_workers_are_found_without_reading_the_effects_of_living_ones(
    crowded: Database,
) -> None:
    await execute(crowded.url, "update workers set expires_at = now() where id = 'busy7'")
    await execute(crowded.url, "delete from workers where id = 'busy8'")
    read, claimed = await read_for(crowded, EACH // 25, worker=HEIR)
    assert sum(c.crashes for c in claimed) == 2, "one for each death"
    assert read < 500 + len(claimed) * 6
    _, claimed = await read_for(crowded, 1, worker=HEIR)
    assert [c.crashes for c in claimed] == [0]


async def read_by(database: Database, query: str) -> int:
    """Run a query, and return the number of rows that were read."""
    async with database.durable.acquire() as connection, connection.transaction():
        before = await connection.fetchval(READ)
        await connection.fetch(query)
        return int(await connection.fetchval(READ) - before)


LEFT = "select has_unfinished('{control,train}', '{sync}')"


async def test_the_check_for_unfinished_work_reads_few_rows(crowded: Database) -> None:
    assert await read_by(crowded, LEFT) < 50


async def test_the_counts_of_a_lane_have_a_limit(crowded: Database) -> None:
    held = EACH
    assert await read_by(crowded, "select * from count_effects(100)") < 5 * 100 + 2 * held + 200
    found = await crowded.durable.fetch("select * from count_effects(100)")
    assert [tuple(row)[:3] for row in found] == [("control", 100, held), ("user", 100, 0)]


async def test_twin_a_count_of_the_table_reads_everything(crowded: Database) -> None:
    everything = len((*OTHERS, WAITS)) * EACH
    assert await read_by(crowded, "select lane, count(*) from effects group by lane") >= everything


async def test_a_claim_with_a_limit_for_each_run_reads_no_run_that_is_at_its_limit(
    crowded: Database,
) -> None:
    """A hundred runs, each with a hundredth of what waits. One more has ten times as much, before all
    others in its turns, and is at its limit."""
    await execute(crowded.url, rows(*WAITS, run="'greedy'") * 2)
    await execute(crowded.url, "update effects set turn = -1 where run_id = 'greedy'")
    claim = "select * from claim_in_turn('me', '{control}', '{sync}', '{50}', 0, array[8])"
    runs = await crowded.durable.fetch(claim)
    assert [row["run_id"] for row in runs].count("greedy") == 8
    held = EACH
    assert await read_by(crowded, claim) < held + 1000, "not the ten thousand of the greedy run"
    mine = "select run_id, count(*) from effects where worker = 'me' group by run_id"
    assert max(row["count"] for row in await crowded.durable.fetch(mine)) == 8


async def test_a_claim_for_spare_places_reads_the_head_of_the_queue_only(
    crowded: Database,
) -> None:
    """A large run has twenty thousand effects there, and then a small one is next to it."""
    await execute(crowded.url, rows(*WAITS, run="'large'") * 4)
    await execute(crowded.url, "update effects set turn = -1 where run_id = 'large'")
    await execute(crowded.url, rows(*WAITS, run="'small'").replace(str(EACH), "20"))
    await execute(crowded.url, "update effects set turn = -1.5 where run_id = 'small'")
    spare = "select * from claim_in_turn('me', '{control}', '{sync}', '{0}', 0, null, null, '{8}')"
    hold = "update effects set worker = 'me' where id in (select id from effects where {} limit {})"
    await execute(crowded.url, hold.format("run_id = 'large'", 64))
    found = await crowded.durable.fetch(spare)
    assert [row["run_id"] for row in found] == ["small"] * 8
    assert await read_by(crowded, spare) < 500, "not the twenty thousand of the large run"
    assert await crowded.durable.fetch(spare) == [], "both hold eight"


async def test_effects_of_a_newer_release_do_not_hide_others_from_the_spare_places(
    crowded: Database,
) -> None:
    await execute(crowded.url, rows(*WAITS, run="'newer'"))
    await execute(crowded.url, "update effects set turn = -1 where run_id = 'newer'")
    newer = "insert into run_gates (run_id, state, decider) values ('newer', 'open', 99)"
    await execute(crowded.url, newer)
    spare = "select * from claim_in_turn('me', '{control}', '{sync}', '{0}', 0, null, null, '{8}')"
    assert len(await crowded.durable.fetch(spare)) == 8


PAUSED = "insert into run_gates select 'p' || n, 'paused' from generate_series(0, 9) n"


@pytest.fixture
async def resting(crowded: Database) -> Database:
    """Ten more runs, which made their requests before all the others and were then paused."""
    await execute(crowded.url, rows(*WAITS[:3], "now() - interval '1 hour'", run="'p' || n % 10"))
    await execute(crowded.url, PAUSED)
    await execute(crowded.url, "vacuum effects")
    return crowded


async def test_effects_of_paused_runs_cost_other_runs_nothing(resting: Database) -> None:
    read, claimed = await read_for(resting, 100)
    assert len(claimed) == 100
    mine = "select count(*) from effects where worker = 'me' and run_id like 'p%'"
    assert await resting.durable.fetchval(mine) == 0
    assert read < 500 + 100 * 6


async def test_twin_without_the_mark_each_claim_walks_through_it(resting: Database) -> None:
    await execute(resting.url, "update effects set shut = false, turn = -1 where shut")
    read, claimed = await read_for(resting, 100)
    assert len(claimed) == 100
    assert read > EACH


async def test_effects_of_paused_runs_that_the_dead_held_are_read_once(resting: Database) -> None:
    await execute(resting.url, "update effects set worker = 'busy7' where run_id = 'p3'")
    await execute(resting.url, "update workers set expires_at = now() where id = 'busy7'")
    read, claimed = await read_for(resting, EACH // 50, worker=HEIR)
    assert len(claimed) == EACH // 50, "what it held of other runs"
    await execute(resting.url, "vacuum effects")
    read, claimed = await read_for(resting, 10, worker=HEIR)
    assert len(claimed) == 10
    assert read < 500 + 10 * 6
    await execute(resting.url, "update run_gates set state = 'open' where run_id = 'p3'")
    await read_for(resting, 2 * EACH, worker=HEIR)
    once = "select count(*) from effects where run_id = 'p3' and worker = 'heir' and deaths = 1"
    assert await resting.durable.fetchval(once) == EACH // 10


async def test_a_run_that_goes_on_has_its_effects_back(resting: Database) -> None:
    hold = "update run_gates set holds = {} where run_id = 'p3'"
    await execute(resting.url, hold.format(1))
    await execute(resting.url, "update run_gates set state = 'open' where run_id in ('p3', 'p4')")
    await read_for(resting, 2 * EACH)
    open_ = "select count(*) from effects where run_id = 'p4' and worker = 'me'"
    assert await resting.durable.fetchval(open_) == EACH // 10
    await execute(resting.url, hold.format(0))
    await read_for(resting, EACH // 10, worker=HEIR)
    freed = "select count(*) from effects where run_id = 'p3' and worker = 'heir'"
    assert await resting.durable.fetchval(freed) == EACH // 10


@pytest.mark.parametrize("first", ["the effect", "the gate"])
async def test_an_effect_asked_for_while_its_run_is_resumed_is_claimed(
    database: Database, first: str
) -> None:
    """The second transaction waits for the first, and sees its writes."""
    await execute(database.url, "insert into run_gates values ('r', 'paused')")
    await execute(database.url, LEASE.format(who="'me'"))
    async with (
        Notifier(database) as notifier,
        database.durable.acquire() as one,
        database.durable.acquire() as two,
    ):
        log = PostgresLog(database, notifier)
        log._pool = one if first == "the effect" else two

        async def ask() -> None:
            await log.commit(Commit(effects=(asked("r"),)))

        async def resume() -> None:
            connection = two if first == "the effect" else one
            await connection.execute("update run_gates set state = 'open' where run_id = 'r'")

        begins, follows = (ask, resume) if first == "the effect" else (resume, ask)
        transaction = one.transaction()
        await transaction.start()
        await begins()
        second = asyncio.ensure_future(follows())
        await until_it_waits(database, two.get_server_pid())
        assert not second.done()
        await transaction.commit()
        await second
    _, claimed = await read_for(database, 10)
    assert len(claimed) == 1


async def test_resuming_while_an_outcome_of_the_run_is_committed_ends_neither(
    database: Database,
) -> None:
    """The commit of an outcome that requests more effects is held up between the effect that it
    finishes and those that it requests; meanwhile its run is resumed. If they locked in different
    orders, each would wait for the other, and Postgres would end one of them."""
    await execute(database.url, LEASE.format(who="'me'"))
    held, more = replace(asked("r"), claimed=True), replace(asked("r"), effect=effect("r", 2))
    async with (
        Notifier(database) as notifier,
        database.durable.acquire() as one,
        database.durable.acquire() as two,
        database.durable.acquire() as barrier,
    ):
        log = PostgresLog(database, notifier)
        await log.append([CheckpointFailed(run="r", step=1, message="x")], cause=uuid4())
        await log.commit(Commit(worker=ME, effects=(held,)))
        await log.commit(moved(RunPaused(run="r", step=1), 1))
        outcome = Commit(
            worker=ME,
            finished=((held.effect.id, 1),),
            expected={checkpoint_stream("r"): 1},
            events=(new(CheckpointFailed(run="r", step=2, message="x"), 2),),
            effects=(more,),
        )
        transaction = barrier.transaction()
        await transaction.start()
        await barrier.execute("select from streams where stream = 'checkpoint-r' for update")
        tasks = []
        for connection, commit in ((one, outcome), (two, moved(RunResumed(run="r", step=1), 2))):
            committing = PostgresLog(database, notifier)
            committing._pool = connection
            tasks.append(asyncio.ensure_future(committing.commit(commit)))
            await until_it_waits(database, connection.get_server_pid())
        await transaction.rollback()
        await asyncio.gather(*tasks)
    _, claimed = await read_for(database, 10)
    assert [c.id for c in claimed] == [more.effect.id], "it is not shut"


def moved(event: Event, version: int) -> Commit:
    """A commit whose event changes a run's gate."""
    return Commit(expected={event.stream: version - 1}, events=(new(event, version),))


def new(event: Event, version: int) -> NewEvent:
    return NewEvent(
        id=EventId(uuid4()),
        stream=event.stream,
        version=version,
        event=event,
        causation=uuid4(),
        correlation=uuid4(),
    )


def asked(run: str) -> NewEffect:
    return NewEffect(
        effect=effect(run, 1),
        consumer=MINE,
        stream=StreamName("workspace-w"),
        correlation=uuid4(),
    )


async def until_it_waits(database: Database, pid: Any) -> None:
    """Wait until a session waits for another's lock."""
    waits = "select cardinality(pg_blocking_pids($1)) > 0"
    async with asyncio.timeout(60):
        while not await database.lazy.fetchval(waits, pid):
            await asyncio.sleep(0.01)


async def test_twin_without_the_indexes_a_claim_reads_everything(crowded: Database) -> None:
    await execute(crowded.url, "drop index effects_ready; drop index effects_held")
    read, claimed = await read_for(crowded, 1)
    assert len(claimed) == 1
    assert read > 5 * EACH


async def test_claims_at_once_share_what_waits_and_miss_nothing(crowded: Database) -> None:
    """A claim that meets rows locked by another claim continues with the rows after them."""
    taken: set[UUID] = set()
    async with crowded.durable.acquire() as first, first.transaction():
        effects = PostgresEffects(crowded)
        effects._pool = first
        held = await effects.claim(ME, room={Lane.CONTROL: EACH - 10}, consumers=[MINE])
        taken |= {c.id for c in held}
        _, rest = await read_for(crowded, 100, worker=HEIR)
        assert len(rest) == 10
        taken |= {c.id for c in rest}
    assert len(taken) == EACH


async def test_effects_added_while_their_run_was_closed_are_deleted_when_a_worker_registers(
    database: Database,
) -> None:
    closed = "insert into run_gates values ('r7', 'closed')"
    await execute(database.url, rows(*WAITS) + closed)
    effects = PostgresEffects(database)
    await effects.register(ME, host="h", pid=1, lease_s=60)
    left = "select count(*) filter (where run_id = 'r7') as closed, count(*) as open from effects"
    assert tuple(await database.durable.fetchrow(left)) == (0, EACH - EACH // 100)
