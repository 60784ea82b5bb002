"""A workspace never has more samples in flight than its quota, whoever claims them."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from uuid import uuid4

import pytest

from infra.spine.ports.effects import Claimed, NewEffect
from infra.spine.ports.event_log import Commit
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database
from infra.spine.runtime.hosting import Hosting
from schemas.effects import GenerateGroup, GenerateSample, Lane
from schemas.events import EvaluationRequested, RunRequested
from schemas.ids import ConsumerName, GroupKey, Purpose, WorkerId, group_stream
from tests.kit.commits import commit_of
from tests.kit.postgres import execute
from tests.kit.specs import DATASET, MODEL, config, group_spec, template

pytestmark = pytest.mark.postgres

ROLLOUT = ConsumerName("rollout")
WORKERS = tuple(WorkerId(f"w{number}") for number in range(4))


@pytest.fixture
async def log(database: Database) -> AsyncIterator[PostgresLog]:
    async with Notifier(database) as notifier:
        yield PostgresLog(database, notifier)


@pytest.fixture
async def effects(database: Database) -> PostgresEffects:
    found = PostgresEffects(database)
    for worker in WORKERS:
        await found.register(worker, host="h", pid=1, lease_s=60)
    return found


def sample(owner: str, index: int) -> GenerateSample:
    group = GroupKey(owner, Purpose.TRAIN, 1, 0).id
    spec = group_spec(template(workflow="Say")).model_copy(update={"group": group})
    return GenerateSample(spec=spec, index=index)


def whole_group(owner: str, slot: int, num_samples: int) -> GenerateGroup:
    group = GroupKey(owner, Purpose.TRAIN, 1, slot).id
    spec = group_spec(template(num_samples=num_samples)).model_copy(update={"group": group})
    return GenerateGroup(spec=spec)


async def request_run(log: PostgresLog, run: str, workspace: str | None) -> None:
    requested = RunRequested(
        run=run, run_name=run, config=config(), model=MODEL, dataset=DATASET, workspace=workspace
    )
    await log.commit(commit_of(requested))


def new_effect(wanted: GenerateGroup | GenerateSample) -> NewEffect:
    stream = group_stream(wanted.spec.group)
    return NewEffect(effect=wanted, consumer=ROLLOUT, stream=stream, correlation=uuid4())


async def add(log: PostgresLog, *wanted: GenerateGroup | GenerateSample) -> None:
    await log.commit(Commit(effects=tuple(map(new_effect, wanted))))


async def claim(
    effects: PostgresEffects, who: WorkerId, room: int, samples: int | None
) -> list[Claimed]:
    found = await effects.claim(
        who, room={Lane.GENERATE: room}, consumers=[ROLLOUT], samples=samples
    )
    return list(found)


def owners(claimed: list[Claimed]) -> list[str]:
    return [each.effect.run_id for each in claimed]


async def held_places(database: Database) -> dict[str, int]:
    rows = await database.durable.fetch(
        "select run_id, sum(size) as places from effects where worker is not null group by run_id"
    )
    return {row["run_id"]: row["places"] for row in rows}


async def test_claims_of_several_workers_at_once_never_exceed_the_quota(
    database: Database, log: PostgresLog, effects: PostgresEffects
) -> None:
    """Two runs and an evaluation of one of them share a quota of 7. Another workspace has none, and a
    run without a workspace is not limited."""
    await execute(
        database.url, "insert into workspace_quotas values ('rich', 'samples_in_flight', null)"
    )
    for run, workspace in (("a", "w"), ("b", "w"), ("c", "rich"), ("d", None)):
        await request_run(log, run, workspace)
    evaluation = EvaluationRequested(
        evaluation="av1", eval_name="av1", template=template(), rows=(0,), run="a", step=1
    )
    await log.commit(commit_of(evaluation, 2))
    await add(log, *(sample(owner, n) for owner in ("a", "b", "av1") for n in range(20)))
    await add(log, *(sample(owner, n) for owner in ("c", "d") for n in range(10)))
    done = 0
    while done < 80:
        claims = await asyncio.gather(*(claim(effects, who, 6, 7) for who in WORKERS for _ in "ab"))
        held = await held_places(database)
        assert sum(held.get(owner, 0) for owner in ("a", "b", "av1")) <= 7
        for who, claimed in zip([w for w in WORKERS for _ in "ab"], claims, strict=True):
            finished = tuple((each.id, each.epoch) for each in claimed)
            await log.commit(Commit(worker=who, finished=finished))
            done += len(finished)
        assert any(claims), "what waits is claimed as soon as others have finished"


async def test_a_full_workspace_waits_and_others_go_on(
    log: PostgresLog, effects: PostgresEffects
) -> None:
    one, two = WORKERS[:2]
    await request_run(log, "big", "w")
    await request_run(log, "tiny", "other")
    await add(log, *(sample("big", n) for n in range(50)))
    assert owners(await claim(effects, one, 30, 3)) == ["big"] * 3
    await add(log, *(sample("tiny", n) for n in range(3)))
    assert owners(await claim(effects, two, 30, 3)) == ["tiny"] * 3
    assert await claim(effects, one, 30, 3) == []
    assert len(await claim(effects, one, 30, None)) == 30, "without the quota"


async def test_an_own_quota_of_a_workspace_counts_instead_of_the_operators(
    database: Database, log: PostgresLog, effects: PostgresEffects
) -> None:
    await request_run(log, "r", "w")
    await add(log, *(sample("r", n) for n in range(20)))
    set_own = "insert into workspace_quotas values ('w', 'samples_in_flight', 4)"
    await execute(database.url, set_own)
    assert len(await claim(effects, WORKERS[0], 9, None)) == 4, "no setting is needed"
    await execute(database.url, "update workspace_quotas set most = 6")
    assert len(await claim(effects, WORKERS[1], 9, 5)) == 2


async def test_a_group_larger_than_the_quota_is_sampled_alone(
    log: PostgresLog, effects: PostgresEffects
) -> None:
    one = WORKERS[0]
    await request_run(log, "r", "w")
    await add(log, whole_group("r", 0, 8), whole_group("r", 1, 3), whole_group("r", 2, 3))
    (first,) = await claim(effects, one, 100, 5)
    assert first.size == 8
    assert await claim(effects, one, 100, 5) == []
    await log.commit(Commit(worker=one, finished=((first.id, first.epoch),)))
    (second,) = await claim(effects, one, 100, 5)
    assert second.size == 3, "3 and 3 are more than 5"


async def test_samples_that_are_requested_together_with_their_evaluation_count(
    log: PostgresLog, effects: PostgresEffects
) -> None:
    """One commit has the evaluation, from which its workspace follows, and its samples."""
    await request_run(log, "r", "w")
    evaluation = EvaluationRequested(
        evaluation="av1", eval_name="av1", template=template(), rows=(0,), run="r", step=1
    )
    wanted = tuple(new_effect(sample("av1", number)) for number in range(9))
    await log.commit(replace(commit_of(evaluation, 2), effects=wanted))
    await add(log, *(sample("r", number) for number in range(9)))
    assert len(await claim(effects, WORKERS[0], 9, 5)) == 5


async def test_effects_of_dead_workers_never_exceed_the_quota_when_claimed_again(
    database: Database, log: PostgresLog, effects: PostgresEffects
) -> None:
    await request_run(log, "r", "w")
    await add(log, *(sample("r", number) for number in range(20)))
    for dying, heir in itertools.pairwise(WORKERS):
        await claim(effects, dying, 9, 6)
        await effects.expire(dying)
        await claim(effects, heir, 9, 6)
        held = await database.durable.fetch(
            "select worker, sum(size) as places from effects where worker is not null"
            " group by worker"
        )
        assert [row["worker"] for row in held] == [heir]
        assert held[0]["places"] <= 6, "what outlives two deaths takes more places"


async def test_samples_of_many_workspaces_are_claimed_in_their_turns(
    database: Database, log: PostgresLog, effects: PostgresEffects
) -> None:
    """Also when one workspace has many turns before those of all others."""
    for number in range(20):
        await request_run(log, f"r{number}", f"w{number}")
        await add(log, *(sample(f"r{number}", index) for index in range(20)))
    await execute(database.url, "update effects set turn = 10 + (hashtext(id::text) & 1023)")
    await execute(database.url, "update effects set turn = turn / 100 where run_id = 'r7'")
    wanted = await database.durable.fetch("select id from effects order by turn, created limit 96")
    for first in range(0, 96, 16):
        claimed = await claim(effects, WORKERS[0], 16, 50)
        assert [each.id for each in claimed] == [row["id"] for row in wanted[first : first + 16]]


async def test_a_lane_with_a_quota_has_no_spare_places(
    database: Database, log: PostgresLog, effects: PostgresEffects
) -> None:
    await request_run(log, "a", "w")
    await add(log, *(sample("a", n) for n in range(9)))

    async def claim_spare(samples: int | None) -> int:
        found = await effects.claim(
            WORKERS[0],
            room={Lane.GENERATE: 0},
            consumers=[ROLLOUT],
            samples=samples,
            spare={Lane.GENERATE: 4},
        )
        return len(found)

    assert await claim_spare(2) == 0
    quota = "insert into workspace_quotas values ('other', 'samples_in_flight', 5)"
    await execute(database.url, quota)
    assert await claim_spare(None) == 0
    await execute(database.url, "delete from workspace_quotas")
    assert await claim_spare(None) == 4


FILL = """
insert into run_gates (run_id, state, workspace)
    select 'r' || n, 'open', 'w' || n % 2 from generate_series(0, 99) n;
insert into effects (id, consumer, stream, lane, run_id, type, data, correlation, turn, workspace)
    select gen_random_uuid(), 'rollout', 'group-g', 'generate', 'r' || n % 100, 'GenerateSample',
           '{}', gen_random_uuid(), n, 'w' || n % 2
    from generate_series(0, 19999) n;
"""


async def buffers(database: Database, samples: int | None) -> int:
    """The buffers that a claim of 16 samples reads when it is made for the second time."""
    query = (
        "explain (analyze, buffers, format json) select * from claim_in_turn("
        "'w0', '{generate}', '{rollout}', '{16}', 0, null, $1::bigint)"
    )
    async with database.durable.acquire() as connection:
        for _ in range(2):
            plan = json.loads(await connection.fetchval(query, samples))[0]["Plan"]
    assert plan["Actual Rows"] == 16
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@pytest.mark.parametrize("analyzed", [True, False])
async def test_a_claim_with_a_quota_reads_little_more_than_one_without(
    database: Database, effects: PostgresEffects, analyzed: bool
) -> None:
    """A hundred runs wait, and half of the samples belong to a workspace that is at its quota."""
    await execute(database.url, "alter table effects set (autovacuum_enabled = off)")
    await execute(database.url, FILL)
    if analyzed:
        await execute(database.url, "analyze effects")
    await execute(
        database.url, "insert into workspace_quotas values ('w1', 'samples_in_flight', 0)"
    )
    with_quota = await buffers(database, 1000)
    await execute(database.url, "delete from workspace_quotas")
    assert with_quota < 1.5 * await buffers(database, None)


def test_only_a_claim_begins_a_sample() -> None:
    """An administrator can set a quota at any time, so no sample is born claimed."""
    hosting = Hosting(WORKERS[0], (), (Lane.GENERATE, Lane.TRAIN))
    assert hosting.is_limited(Lane.GENERATE)
    assert not hosting.is_limited(Lane.TRAIN)
