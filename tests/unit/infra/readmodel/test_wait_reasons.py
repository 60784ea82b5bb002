"""The reason why a run waits is always shown: from events alone, and with facts from a database."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from infra.readmodel.wait_facts import Waits
from infra.readmodel.wait_reasons import (
    BrokerFact,
    EffectFact,
    Facts,
    HolderFact,
    LetterFact,
    NewerEventFact,
    NewerRunFact,
    StepFact,
    WorkerFact,
    waits_of,
    without_machines,
)
from infra.spine.postgres.pool import Database
from tests.kit.postgres import execute, open_database

WORKER = WorkerFact(id="w1", host="here", pid=7, lanes=("generate", "train"), lease_s=4.0)
SAMPLE = EffectFact("GenerateSample", "generate", step=40)
BUSY = replace(WORKER, held=3)
HOLDER = HolderFact(
    database="headrace", username="ann", pid=42, application="psql", address=None, since_s=600
)
TRAIN = EffectFact("TrainStep", "train")


@pytest.mark.parametrize(
    ("facts", "what", "said"),
    [
        (
            Facts(letters=[LetterFact("0b8f6d0f-7a11", "learn", "a cause")], workers=[WORKER]),
            "letter",
            "dead letter 0b8f6d0f-7a11 of learn holds it: a cause",
        ),
        (
            Facts(newer=[NewerRunFact("r", 2)], workers=[WORKER]),
            "release",
            "run r began under a newer release of Headrace (decider version 2), and the newest live",
        ),
        (
            Facts(unknown=NewerEventFact("run-r/7", "rl.run.foreseen", 1), workers=[WORKER]),
            "release",
            "a newer release of Headrace wrote run-r/7 (rl.run.foreseen version 1)",
        ),
        (Facts(gate="paused", workers=[WORKER]), "gate", "it is paused: headrace train resume"),
        (Facts(full=["/home"], workers=[WORKER]), "disk", "the disk that holds /home is full"),
        (
            Facts(effects=[replace(TRAIN, error="No space left on device", due_s=3)]),
            "disk",
            "TrainStep failed, again in 3 s: No space left on device",
        ),
        (
            Facts(effects=[EffectFact("FetchCommit", "control", error="could not resolve host")]),
            "git",
            "FetchCommit failed, again now: could not resolve host",
        ),
        (
            Facts(effects=[replace(TRAIN, error="the S3 store answered 503", due_s=2)] * 2),
            "store",
            "2 TrainStep failed, again in 2 s: the S3 store answered 503",
        ),
        (Facts(effects=[replace(TRAIN, error="odd")]), "retry", "TrainStep failed, again now: odd"),
        (
            Facts(effects=[replace(TRAIN, worker="gone", lease_s=-30)], workers=[WORKER]),
            "lease",
            "claimed by gone, whose lease ended 30 s ago; another worker takes it over",
        ),
        (
            Facts(effects=[replace(TRAIN, worker="gone", lease_s=-30)]),
            "lease",
            "no live worker takes lane train",
        ),
        (
            Facts(effects=[TRAIN, TRAIN], workers=[replace(WORKER, lanes=("user",))]),
            "capacity",
            "2 of its effects in lane train are due (TrainStep); no live worker takes that lane",
        ),
        (
            Facts(effects=[TRAIN], workers=[BUSY]),
            "capacity",
            "the workers of that lane (1) hold 3 effects",
        ),
        (
            Facts(hidden=True, holders=[HOLDER], workers=[WORKER]),
            "horizon",
            "pid 42 (psql, user ann) in database headrace, open since 10 min ago; end it: select "
            "pg_terminate_backend(42)",
        ),
        (
            Facts(
                hidden=True,
                holders=[HolderFact("headrace", "ann", name="gid", since_s=9000)],
                workers=[WORKER],
            ),
            "horizon",
            "prepared transaction 'gid' of ann in database headrace, prepared 2 h ago; end it: "
            "commit prepared or rollback prepared 'gid'",
        ),
        (
            Facts(broker=BrokerFact(seen_s=90, behind=4), workers=[WORKER]),
            "broker",
            "Kafka does not answer (seen last 90 s ago, 4 events to publish)",
        ),
        (Facts(), "workers", "no worker has a live lease"),
        (
            Facts(effects=[replace(TRAIN, worker="w1", lease_s=4)], workers=[WORKER]),
            "effect",
            "training",
        ),
        (
            Facts(effects=[replace(TRAIN, worker="w1", lease_s=4, silent_s=14_000)]),
            "stalled",
            "TrainStep shows no progress: w1 claimed it 4 h ago",
        ),
        (
            Facts(effects=[replace(TRAIN, worker="w1", lease_s=4, attempts=1)], workers=[WORKER]),
            "effect",
            "w1 (pid 7 on here) performs TrainStep again; its lease ends in 4 s unless it is renewed",
        ),
        (
            Facts(
                effects=[SAMPLE, replace(SAMPLE, worker="w1", lease_s=4)],
                workers=[WORKER],
                sampled=StepFact(40, 16, 128),
            ),
            "effect",
            "sampling step 40: 16 of 128",
        ),
        (
            Facts(undecided=["run"], workers=[WORKER]),
            "decision",
            "its last event has not been consumed by: run",
        ),
    ],
)
def test_each_reason_is_said(facts: Facts, what: str, said: str) -> None:
    first = waits_of(facts)[0]
    assert first["what"] == what
    assert said in first["message"]


@pytest.mark.parametrize(
    "facts",
    [
        Facts(workers=[WORKER]),
        Facts(status="finished"),
        Facts(holders=[HOLDER], workers=[WORKER]),
        Facts(hidden=True, holders=[replace(HOLDER, since_s=0.1)], workers=[WORKER]),
        Facts(broker=BrokerFact(seen_s=1, behind=1), workers=[WORKER]),
        Facts(newer=[NewerRunFact("r", 2)], workers=[WORKER, replace(WORKER, decider=2)]),
    ],
    ids=["nothing", "ended", "nothing-hidden", "short-transaction", "broker-seen", "upgraded"],
)
def test_harmless_facts_are_not_reported(facts: Facts) -> None:
    assert waits_of(facts) == []


def test_blocking_reasons_come_first() -> None:
    facts = Facts(
        effects=[
            replace(TRAIN, worker="w1", lease_s=4),
            EffectFact("GradeGroup", "user", error="the disk is full"),
        ],
        workers=[WORKER],
    )
    assert [wait["what"] for wait in waits_of(facts)] == ["disk", "effect"]


@pytest.mark.parametrize(
    "facts",
    [
        Facts(full=["/srv/home"], workers=[WORKER]),
        Facts(hidden=True, holders=[HOLDER], workers=[WORKER]),
        Facts(hidden=True, holders=[HolderFact("headrace", "ann", name="gid", since_s=9000)]),
        Facts(effects=[TRAIN], workers=[WORKER]),
        Facts(effects=[replace(TRAIN, worker="w1", lease_s=4, attempts=1)], workers=[WORKER]),
        Facts(effects=[replace(TRAIN, worker="w1", lease_s=-4)], workers=[WORKER]),
        Facts(effects=[replace(TRAIN, worker="w1", lease_s=4, silent_s=99_999)], workers=[WORKER]),
    ],
    ids=["disk", "holder", "prepared", "capacity", "again", "lease", "stalled"],
)
def test_tenants_learn_the_reasons_but_no_machine(facts: Facts) -> None:
    names = ("w1", "here", "pid", "42", "ann", "psql", "gid", "/srv")
    told, whole = waits_of(without_machines(facts)), waits_of(facts)
    assert [wait["what"] for wait in told] == [wait["what"] for wait in whole]
    assert any(name in wait["message"] for name in names for wait in whole)
    assert not any(name in wait["message"] for name in names for wait in told)


EFFECT = """
insert into effects (id, consumer, stream, lane, run_id, type, data, correlation, worker, error)
values (gen_random_uuid(), 'learn', 'policy-r', '{lane}', '{run}', '{type}', '{data}',
        gen_random_uuid(), {worker}, {error})
"""
EVENT = """
insert into events (id, stream, version, type, schema_version, data, run_id, correlation, time)
values ('{id}', 'run-r', {version}, 'rl.run.warned', 1, '{{}}', 'r', '{id}', clock_timestamp(){time})
"""
WORKERS = """
insert into workers (id, host, pid, lanes, expires_at) values
  ('live', 'here', 7, '{{train}}', clock_timestamp() + interval '1 hour'),
  ('dead', 'here', 8, '{{train}}', clock_timestamp() - interval '1 minute')
"""


def effect(
    type_: str = "TrainStep",
    *,
    run: str = "r",
    lane: str = "train",
    data: str = "{}",
    worker: str | None = None,
    error: str | None = None,
) -> str:
    quoted = {"worker": worker, "error": error}
    values = {name: f"'{value}'" if value else "null" for name, value in quoted.items()}
    return EFFECT.format(type=type_, run=run, lane=lane, data=data, **values)


def appended(version: int, time: str = "") -> str:
    return EVENT.format(id=uuid4(), version=version, time=time)


async def said(database: Database, run: str | None = "r", **more: Any) -> list[str]:
    facts = await Waits(database).facts(run, **more)
    return [f"{wait['what']}: {wait['message']}" for wait in waits_of(facts)]


def test_a_run_without_a_live_worker_waits_for_no_newer_release() -> None:
    (wait,) = waits_of(Facts(newer=[NewerRunFact("r", 2)]))
    assert wait["what"] == "workers"


@pytest.mark.postgres
async def test_the_event_at_which_a_run_waits_for_a_newer_release_is_named(
    database: Database,
) -> None:
    """It is looked for once the last event of the run is not consumed for a while."""
    unknown = appended(2).replace("rl.run.warned", "rl.run.foreseen")
    stood = appended(3, " - interval '20 seconds'")
    mark = "insert into watermarks (consumer, xid, position) values ('run', '0', 0)"
    for statement in (WORKERS.format(), mark, appended(1), unknown, stood):
        await execute(database.url, statement)
    assert any("wrote run-r/2 (rl.run.foreseen version 1)" in line for line in await said(database))
    gate = "insert into run_gates (run_id, state, decider) values ('r', 'open', 2)"
    await execute(database.url, gate)
    assert (await said(database))[0].startswith("release: run r began under a newer release")
    assert (await said(database, None))[0].startswith("release: run r began under a newer")
    await execute(database.url, "update workers set decider = 2")
    assert not any("began" in line for line in await said(database))


@pytest.mark.postgres
async def test_the_event_at_which_a_workspace_waits_for_a_newer_release_is_named(
    database: Database,
) -> None:
    stood = appended(1, " - interval '20 seconds'").replace("run-r", "workspace-w")
    mark = "insert into watermarks (consumer, xid, position) values ('sync', '0', 0)"
    skipped = (
        "insert into skipped_events select 'project', id::text, run_id, type, stream, version,"
        " xid::text::bigint, position, 'NewerEvent: unknown', clock_timestamp() from events"
    )
    for statement in (WORKERS.format(), mark, stood):
        await execute(database.url, statement)
    wrote = "wrote workspace-w/1 (rl.run.warned version 1)"
    assert not any(wrote in line for line in await said(database, None))
    await execute(database.url, skipped)
    assert any(wrote in line for line in await said(database, None))
    await execute(
        database.url, "insert into inbox (consumer, event_id) select 'sync', id from events"
    )
    assert not any(wrote in line for line in await said(database, None)), "a newer process has it"


@pytest.mark.postgres
async def test_effects_and_leases_are_read_for_the_run_and_for_all(database: Database) -> None:
    fetching = effect(
        "FetchCommit", run="w", lane="control", data='{"requester": "run-r"}', error="no host"
    )
    for statement in (
        WORKERS.format(),
        effect(worker="live"),
        effect(worker="dead"),
        effect("GradeGroup", lane="user"),
        effect(run="another", lane="generate"),
        fetching,
    ):
        await execute(database.url, statement)
    found = await said(database)
    assert [line.split(":")[0] for line in found] == ["git", "lease", "capacity", "effect"]
    assert "no host" in found[0]
    assert "claimed by dead, whose lease ended 60 s ago" in found[1]
    assert "lane user" in found[2]
    assert found[3] == "effect: training"
    assert any("lane generate" in line for line in await said(database, None))
    await execute(database.url, "insert into run_gates (run_id, state) values ('r', 'paused')")
    assert (await said(database))[0].startswith("gate: ")


@pytest.mark.postgres
async def test_a_run_held_by_the_samples_of_its_workspace_says_so(database: Database) -> None:
    for run in ("r", "other"):
        gate = f"insert into run_gates (run_id, state, workspace) values ('{run}', 'open', 'w')"
        await execute(database.url, gate)
    for statement in (
        WORKERS.format(),
        effect("GenerateSample", lane="generate"),
        effect("GenerateSample", run="other", lane="generate", worker="live"),
    ):
        await execute(database.url, statement)
    await execute(database.url, "update workers set lanes = '{train, generate}'")
    held = "quota: its workspace has 1 samples in flight and may have 1; "
    found = await said(database, most_samples=1)
    assert found[0].startswith(held)
    assert not any(line.startswith("capacity") for line in found), "nobody is about to claim it"
    for most in (2, None):
        assert not any("quota" in line for line in await said(database, most_samples=most))
    quota = (
        "insert into workspace_quotas (workspace, name, most) values ('w', 'samples_in_flight', "
    )
    await execute(database.url, quota + "null)")
    assert not any("quota" in line for line in await said(database, most_samples=1))
    await execute(database.url, "update workspace_quotas set most = 0")
    await execute(database.url, "update effects set worker = null")
    assert "0 samples in flight and may have 0" in (await said(database))[0]
    large = "a sample larger than the limit is claimed when nothing else is in flight"
    await execute(database.url, "update workspace_quotas set most = 1")
    await execute(database.url, "update effects set size = 4")
    assert not any("quota" in line for line in await said(database)), large


@pytest.mark.postgres
async def test_broker_consumers_and_disks_are_read(database: Database, tmp_path: Path) -> None:
    await execute(database.url, WORKERS.format())
    await execute(database.url, appended(1))
    await execute(database.url, "insert into watermarks values ('learn', '0', 0)")
    await execute(
        database.url,
        "insert into relay (name, cluster, ends, xid, position, seen_at) values"
        " ('kafka', 'c', '{}', '0', 0, clock_timestamp() - interval '1 minute')",
    )
    assert await said(database) == [], "it was appended a moment ago"
    await execute(database.url, appended(2, " - interval '1 hour'"))
    decision = "decision: its last event has not been consumed by: learn"
    async with asyncio.timeout(60):
        while decision not in await said(database):
            await asyncio.sleep(0.01)
    assert (await said(database, kafka_behind=3))[0].startswith("broker: Kafka does not answer")
    assert await said(database, None, directories=[tmp_path / "none yet"]) == []


@asynccontextmanager
async def writing(url: str, version: int) -> AsyncIterator[int]:
    """An open transaction that has appended an event; gives the pid of its session."""
    connection = await asyncpg.connect(url, server_settings={"application_name": "forgotten"})
    try:
        await connection.execute("begin")
        await connection.execute(appended(version))
        yield int(await connection.fetchval("select pg_backend_pid()"))
        await connection.execute("rollback")
    finally:
        await connection.close()


@pytest.mark.postgres
async def test_the_holder_of_the_horizon_is_named(preparing: str) -> None:
    """The reader is a process that may not see the sessions of other users."""
    await execute(preparing, WORKERS.format())
    prepared = f"begin;{appended(1)};prepare transaction 'left'"
    await execute(preparing, prepared)
    async with open_database(preparing) as database, writing(preparing, 2) as pid:
        await execute(preparing, appended(3))
        async with asyncio.timeout(60):
            while len(found := await said(database)) < 2:
                await asyncio.sleep(0.05)
        name = preparing.rpartition("/")[2]
        assert f"prepared transaction 'left' of postgres in database {name}" in found[0]
        assert f"pid {pid} (forgotten, user postgres" in found[1]
        assert f"in database {name}" in found[1]
    await execute(preparing, "rollback prepared 'left'")
