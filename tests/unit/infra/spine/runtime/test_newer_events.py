"""Messages that only a newer release can decide on are left for its processes, and every other run goes
on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from consumers.sync import consumer as sync
from infra.spine.bus import reconciler
from infra.spine.bus.reconciler import Tail
from infra.spine.memory.event_log import MemoryLog
from infra.spine.ports.event_log import Cursor, Recorded
from infra.spine.postgres.effects import PostgresEffects
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database
from infra.spine.runtime.consumer import NOTHING, AnyConsumer
from infra.spine.runtime.hosting import Hosting
from schemas.effects import FetchCommit, Lane
from schemas.events import CommitRequested, Event, RunWarned
from schemas.events.decider_version import DECIDER_VERSION
from schemas.ids import ConsumerName, StreamName, WorkerId, checkpoint_stream, run_stream
from schemas.specs import CommitSpec
from tests.kit.commits import commit_of
from tests.kit.hosting import Bench, Fetched, Script, consumer
from tests.kit.newer import (
    NewerCheckpointFailed,
    NewerCommitRequested,
    NewerRunWarned,
    RunForeseen,
    upgrade,
)
from tests.kit.runtimes import runtime_on

BENCH = ConsumerName("bench")
WORKER = WorkerId("w")

DECIDED = NewerCheckpointFailed(run="future", step=1, message="decided")


def warned(run: str, step: int = 1, kind: type[RunWarned] = RunWarned) -> RunWarned:
    return kind(run=run, step=step, message="look")


async def test_a_newer_version_of_an_event_is_left_and_other_runs_go_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [consumer(Script())])
    await bench.write(warned("future", kind=NewerRunWarned))
    await bench.warn("other", 1, 2)
    async with bench.running():
        await bench.until(lambda: bench.seen("other") == [1, 2])
    assert bench.letters() == []
    assert (BENCH, bench.world.events[0].id) not in bench.world.inbox


async def test_nothing_is_decided_on_a_stream_that_a_newer_release_continued(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, [consumer(Script())])
    await bench.write(DECIDED)
    (left,) = await bench.warn("future", 2)
    await bench.warn("other", 1, 2)
    async with bench.running():
        await bench.until(lambda: bench.seen("other") == [1, 2])
    assert bench.letters() == []
    assert (BENCH, left.id) not in bench.world.inbox
    assert bench.world.version(checkpoint_stream("future")) == 1


async def test_a_newer_event_of_a_workspace_holds_only_that_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what came before it waits, because the stream cannot be folded. Newer processes go on."""

    def pushed(workspace: str, kind: type[CommitRequested] = CommitRequested) -> CommitRequested:
        return kind(workspace=workspace, workspace_name="w", commit=CommitSpec(url="/nowhere"))

    def fetched() -> set[str]:
        effects = (row.new.effect for row in bench.world.effects.values())
        return {effect.workspace for effect in effects if isinstance(effect, FetchCommit)}

    bench = Bench(tmp_path, [replace(sync.CONSUMER, perform=None)])
    await bench.write(pushed("future", NewerCommitRequested), pushed("future"), pushed("other"))
    async with bench.running():
        await bench.until(lambda: fetched() == {"other"})
        await asyncio.sleep(0.1)
    assert fetched() == {"other"}
    assert bench.letters() == []
    upgrade(monkeypatch)
    async with bench.running():
        await bench.until(lambda: fetched() == {"future", "other"})


async def test_an_effect_whose_outcome_needs_a_newer_release_is_given_back(tmp_path: Path) -> None:
    asking = consumer(Script(asks=True))
    bench = Bench(tmp_path, [asking])

    async def perform(effect: FetchCommit, ports: object) -> Fetched:
        await MemoryLog(bench.world).commit(commit_of(DECIDED))
        return Fetched(effect)

    bench.consumers = [replace(asking, perform=perform)]
    await bench.warn("future", 1)
    now = bench.world.now
    async with bench.running():
        await bench.until(lambda: any(row.due_at > now for row in bench.world.effects.values()))
    (row,) = bench.world.effects.values()
    assert (row.worker, row.attempts) == (None, 0)
    assert bench.letters() == []


async def test_a_run_of_a_newer_release_is_left_alone(tmp_path: Path) -> None:
    script = Script(asks=True)
    bench = Bench(tmp_path, [consumer(script)])
    bench.world.deciders["future"] = DECIDER_VERSION + 1
    (left,) = await bench.warn("future", 1)
    await bench.warn("other", 1)
    async with bench.running():
        await bench.until(lambda: bool(script.performed))
    assert script.performed == ["other"]
    assert (BENCH, left.id) not in bench.world.inbox


async def test_a_message_of_another_thing_is_not_decided_for_a_run_of_a_newer_release(
    tmp_path: Path,
) -> None:
    """As a workspace that is synced for the run."""
    script = Script()

    def routes(message: RunWarned) -> tuple[StreamName, ...]:
        return (run_stream("future" if message.run == "workspace" else message.run),)

    bench = Bench(tmp_path, [replace(consumer(script), routes=routes, handle=lambda *_: NOTHING)])
    bench.world.deciders["future"] = DECIDER_VERSION + 1
    await bench.warn("future", 1)
    (left,) = await bench.warn("workspace", 1)
    (last,) = await bench.warn("other", 1)
    async with bench.running():
        await bench.until(lambda: (BENCH, last.id) in bench.world.inbox)
    assert (BENCH, left.id) not in bench.world.inbox
    assert bench.letters() == []


@pytest.fixture
async def notifier(database: Database) -> AsyncIterator[Notifier]:
    async with Notifier(database) as notifier:
        yield notifier


@pytest.fixture
def log(database: Database, notifier: Notifier) -> PostgresLog:
    return PostgresLog(database, notifier)


@pytest.fixture
def seen() -> list[str]:
    """The runs of the messages that were decided on, in order."""
    return []


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "ADVANCE_S", 0.05)


def reader(seen: list[str], *kinds: type[RunWarned]) -> AnyConsumer:
    """A consumer of warnings that notes what it decides on."""

    def note(event: RunWarned) -> None:
        seen.append(f"{event.run}/{event.step}")

    return replace(consumer(Script(on_event=note)), reads=(RunWarned, *kinds))


@asynccontextmanager
async def working(
    database: Database, notifier: Notifier, reads: AnyConsumer, home: Path
) -> AsyncIterator[None]:
    await PostgresEffects(database).register(WORKER, host="h", pid=1, lease_s=600)
    runtime = runtime_on(database, notifier, Hosting(WORKER, (reads,), (Lane.CONTROL,)), home=home)
    task = asyncio.ensure_future(runtime.run())
    try:
        yield
    finally:
        runtime.stop()
        await task


async def until_seen(seen: list[str], *messages: str) -> None:
    async with asyncio.timeout(60):
        while not set(messages) <= set(seen):
            await asyncio.sleep(0.01)


async def until_watermark(log: PostgresLog, cursor: Cursor) -> None:
    async with asyncio.timeout(60):
        while await log.watermark(BENCH) < cursor:
            await asyncio.sleep(0.01)


async def append(log: PostgresLog, *events: Event) -> list[Recorded]:
    versions: dict[str, int] = {}
    written: list[Recorded] = []
    for event in events:
        versions[event.stream] = versions.get(event.stream, 0) + 1
        written += await log.commit(commit_of(event, versions[event.stream]))
    return written


@pytest.mark.postgres
@pytest.mark.parametrize(
    "newer",
    [
        [warned("future", kind=RunForeseen)],
        [warned("future", kind=NewerRunWarned)],
        [DECIDED, warned("future")],
    ],
    ids=["type", "version", "stream"],
)
async def test_after_an_upgrade_the_event_is_consumed_exactly_once(
    newer: list[Event],
    seen: list[str],
    database: Database,
    notifier: Notifier,
    log: PostgresLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, *_, left, _ = await append(log, warned("before"), *newer, warned("after"))
    async with working(database, notifier, reader(seen), tmp_path):
        await until_seen(seen, "before/1", "after/1")
        await until_watermark(log, before.cursor)
        await append(log, *(warned(f"later{n}") for n in range(5)))
        await until_seen(seen, "later4/1")
        await asyncio.sleep(0.3)  # several times as long as it takes to move the watermark
        assert await log.watermark(BENCH) < left.cursor
        assert not any(message.startswith("future") for message in seen)
    upgrade(monkeypatch)
    async with working(database, notifier, reader(seen, RunForeseen), tmp_path):
        (last,) = await append(log, warned("last"))
        await until_watermark(log, last.cursor)
    assert seen.count("future/1") == 1
    assert len(seen) == len(set(seen)) == 9


@pytest.mark.postgres
async def test_twin_without_holding_the_watermark_a_newer_process_never_gets_it(
    seen: list[str],
    database: Database,
    notifier: Notifier,
    log: PostgresLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def consumed_up_to(self: Tail) -> Cursor:
        return self.cursor

    monkeypatch.setattr(Tail, "_consumed_up_to", consumed_up_to)
    _, after = await append(log, warned("future", kind=RunForeseen), warned("after"))
    async with working(database, notifier, reader(seen), tmp_path):
        await until_watermark(log, after.cursor)
    upgrade(monkeypatch)
    async with working(database, notifier, reader(seen, RunForeseen), tmp_path):
        await append(log, warned("later"))
        await until_seen(seen, "later/1")
    assert "future/1" not in seen


@pytest.mark.postgres
async def test_an_older_process_beside_a_newer_one_follows_its_watermark(
    seen: list[str],
    database: Database,
    notifier: Notifier,
    log: PostgresLog,
    tmp_path: Path,
) -> None:
    """What was left first is consumed elsewhere. Then the next is found, and nothing is held forever."""
    one, two = await append(
        log, warned("future", kind=NewerRunWarned), warned("future2", kind=NewerRunWarned)
    )
    async with working(database, notifier, reader(seen), tmp_path):
        for newer in (one, two):
            await append(log, warned(f"other-{newer.run}"))
            await until_seen(seen, f"other-{newer.run}/1")
            assert await log.watermark(BENCH) < newer.cursor
            async with database.durable.acquire() as connection:
                await connection.execute(
                    "insert into inbox (consumer, event_id) values ($1, $2)", BENCH, newer.id
                )
        (last,) = await append(log, warned("last"))
        await until_watermark(log, last.cursor)
    assert sorted(seen) == ["last/1", "other-future/1", "other-future2/1"]
