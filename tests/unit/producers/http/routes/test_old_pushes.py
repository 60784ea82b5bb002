"""The history of a repository goes when it is old: streams fold into the same state without it, and what
a run, a ref or a later decision still needs stays."""

import asyncio
import random
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from consumers.sync.consumer import CONSUMER as SYNC
from consumers.sync.consumer import WorkspaceState
from consumers.trigger.consumer import CONSUMER as TRIGGER
from consumers.trigger.state import TriggerState
from infra.blobs import garbage
from infra.blobs.garbage import REMOVED_GRACE, collect
from infra.blobs.installed import InstalledBlobs
from infra.spine.postgres.pool import Database
from schemas.artifact_refs import ArtifactRef
from schemas.effects import ExaminePush, Failed, PushRead, RunSubmitted
from schemas.errors import FailureCategory
from schemas.events import (
    CommitRequested,
    CommitStatusDecided,
    CommitStatusPosted,
    Event,
    PackagesChosen,
    RefsListed,
    RefsMoved,
    RefsRequested,
    RunDeleted,
    RunRequested,
    RunStopped,
    WorkspaceConnected,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.ids import StreamName, run_stream, status_stream, trigger_stream, workspace_stream
from schemas.specs import CommitSpec, CommitStatus, Concurrency, PushOrigin, RefMove
from tests.kit.application import Application
from tests.kit.decider import given
from tests.kit.old_events import OldRepositoryPushed
from tests.kit.story import beginning
from tests.unit.consumers.trigger.test_trigger import (
    MAIN,
    examined,
    fired,
    match,
    origin,
    settled,
    skipped,
    submitted,
)
from tests.unit.producers.http.routes.test_records import (
    append,
    assert_sound,
    folded,
    later,
    stored,
    types_in,
)

pytestmark = pytest.mark.postgres

WS = "w1"
DEV = "refs/heads/dev"
URL = "/srv/sums.git"
FIRST = CommitRequested(workspace=WS, workspace_name="sums", commit=CommitSpec(url=URL))
TABLES = ("pushes", "triggered_runs", "workspaces", "log_lines")


def moved(number: int, ref: str = MAIN, *, gone: bool = False, baseline: bool = False) -> RefsMoved:
    before, after = f"{number - 1:040x}", None if gone else f"{number:040x}"
    return RefsMoved(
        workspace=WS,
        workspace_name="sums",
        url=URL,
        round=number,
        moves=(RefMove(ref=ref, before=before, after=after, number=number),),
        baseline=baseline,
    )


async def begin(app: Application) -> None:
    await app.services.readmodel.names.take("workspace", "sums", WS)
    await append(app, FIRST, WorkspaceConnected(workspace=WS, forge="gitea"))


async def add_run(app: Application, run: str) -> None:
    request = next(e for e in beginning(run, run, steps=1) if isinstance(e, RunRequested))
    await append(app, request.model_copy(update={"workspace": None}))


def status_of(subject: str) -> tuple[Event, ...]:
    shown = CommitStatus(workspace=WS, sha="b" * 40, context="c", state="failure", text="wrong")
    return (
        CommitStatusDecided(workspace=WS, subject=subject, number=1, stage=3, status=shown),
        CommitStatusPosted(workspace=WS, subject=subject, number=1),
    )


async def workspace_state(app: Application) -> WorkspaceState:
    """Without the pushes that were answered, which are not delivered again."""
    state, _ = await _folded(app, workspace_stream(WS), SYNC)
    return replace(state, answered=())


async def trigger_state(app: Application) -> TriggerState:
    """Without the pushes that were examined, and without the counts of other days."""
    state, _ = await _folded(app, trigger_stream(WS), TRIGGER)
    counts = {name: kept for name, kept in state.counts.items() if kept.day == state.day}
    return replace(state, examined=(), counts=counts)


async def _folded(app: Application, stream: StreamName, consumer: Any) -> Any:
    return await folded(app, stream, consumer)


async def remove(app: Application, *kinds: str) -> dict[str, int]:
    """More may go than was counted, because some records stay only as long as another one."""
    counted = await app.services.records.count(kinds, before=later())
    removed = await app.services.records.remove(kinds, before=later())
    assert all(counted[kind] <= removed[kind] for kind in kinds)
    return removed


async def assert_same(app: Application, *kinds: str, **removed: int) -> None:
    """Remove these kinds: so many of each go, the streams fold as before, and a rebuild gives the rows
    that are left."""
    before = await workspace_state(app), await trigger_state(app)
    assert await remove(app, *kinds) == removed
    assert (await workspace_state(app), await trigger_state(app)) == before
    rows = {table: await stored(app, table) for table in TABLES}
    await assert_sound(app)
    assert {table: await stored(app, table) for table in TABLES} == rows
    assert await remove(app, *kinds) == dict.fromkeys(kinds, 0)


async def numbers(app: Application) -> list[int]:
    found = await app.database.durable.fetch("select number from pushes order by number")
    return [row["number"] for row in found]


async def test_listings_that_later_ones_repeat_go(app: Application) -> None:
    await begin(app)
    for number, error in ((1, None), (2, "away"), (3, None), (4, "away"), (5, "away")):
        digest, branch = (None, None) if error else (f"d{number}", "main")
        await append(
            app,
            RefsRequested(workspace=WS, round=number, baseline=number == 1),
            RefsListed(
                workspace=WS, round=number, error=error, digest=digest, default_branch=branch
            ),
        )
    await append(app, RefsRequested(workspace=WS, round=6, baseline=True))
    await assert_same(app, "ref_checks", ref_checks=8)
    left = await types_in(app, workspace_stream(WS))
    assert left.count(RefsListed.type) == 2, "the last one, and the last that succeeded"
    assert left.count(RefsRequested.type) == 1


async def test_the_last_commit_of_each_ref_stays(app: Application) -> None:
    await begin(app)
    await append(app, moved(1, baseline=True), moved(2, DEV, baseline=True))
    await append(app, moved(3, baseline=True), moved(4, DEV, baseline=True))
    await append(app, moved(5, DEV, gone=True), moved(6, "refs/tags/v1", baseline=True))
    await assert_same(app, "pushes", pushes=2)
    assert await numbers(app) == [3, 4, 5, 6]


async def test_pushes_without_a_run_that_exists_go_with_their_statuses(app: Application) -> None:
    await begin(app)
    await append(app, *(moved(number) for number in range(1, 7)))
    await append(app, examined(1, day="d1"), examined(2, match(), day="d1"))
    await append(app, skipped(origin(2), "one runs"), *status_of(f"{WS}.1"))
    for number in (3, 4):
        one = origin(number)
        await append(app, examined(number, match(), day="d2"), fired(one), submitted(one))
        await append(app, settled(one), *status_of(one.run))
    await add_run(app, origin(3).run)
    await append(app, RunDeleted(run=origin(4).run), examined(6, day="d3"))
    await assert_same(app, "pushes", pushes=3)
    assert await numbers(app) == [3, 5, 6], "a run, a push that was not examined, and the newest"
    assert await types_in(app, status_stream(f"{WS}.1")) == []
    assert await types_in(app, status_stream(origin(4).run)) == []
    assert len(await types_in(app, status_stream(origin(3).run))) == 2
    await append(app, examined(5, day="d3"), examined(7, day="d3"))
    await append(app, moved(8), examined(8, day="d4"))
    await assert_same(app, "pushes", pushes=2)


async def test_pushes_of_the_day_of_the_newest_one_stay_because_they_count(
    app: Application,
) -> None:
    await begin(app)
    for number in (1, 2, 3):
        one = origin(number)
        await append(app, moved(number), examined(number, match(), day="d1"))
        await append(app, fired(one), submitted(one), settled(one))
    await assert_same(app, "pushes", pushes=0)
    assert next(iter((await trigger_state(app)).counts.values())).count == 3
    await append(app, moved(4), examined(4, day="d2"))
    await assert_same(app, "pushes", pushes=3)


@pytest.mark.parametrize("exists", [True, False])
async def test_a_push_that_superseded_a_run_stays_as_long_as_that_run(
    app: Application, exists: bool
) -> None:
    """Without it, the run that it superseded would count as active."""
    await begin(app)
    kind = match("cancel_previous")
    one, two = origin(1, "cancel_previous"), origin(2, "cancel_previous")
    await append(app, moved(1), examined(1, kind, day="d1"), fired(one), submitted(one))
    await append(app, moved(2), examined(2, kind, day="d1"), fired(two, one.run), submitted(two))
    await append(app, settled(two), moved(3), examined(3, day="d2"))
    if exists:
        await add_run(app, one.run)
    await assert_same(app, "pushes", pushes=0 if exists else 2)
    assert (await trigger_state(app)).scopes == {}


async def test_work_of_a_workspace_keeps_its_history(app: Application) -> None:
    await begin(app)
    await append(app, moved(1), examined(1, day="d1"), moved(2), examined(2, day="d2"))
    await add_effect(app)
    assert await remove(app, "pushes") == {"pushes": 0}
    await app.database.durable.execute("delete from effects")
    await assert_same(app, "pushes", pushes=1)


async def add_effect(app: Application) -> None:
    await app.database.durable.execute(
        "insert into effects (id, consumer, stream, lane, run_id, type, data, correlation)"
        " values ($1, 'sync', 's', 'control', $2, 't', '{}', $1)",
        uuid4(),
        WS,
    )


def synced(snapshot: ArtifactRef, requester: StreamName | None = None) -> WorkspaceSynced:
    return WorkspaceSynced(
        workspace=WS,
        request=uuid4(),
        commit="c" * 40,
        snapshot=snapshot,
        rollouts=(),
        requester=requester,
    )


def sync_of(snapshot: ArtifactRef, requester: StreamName | None = None) -> tuple[Event, ...]:
    """The packages that were chosen for a commit, and the commit that was synced."""
    done = synced(snapshot, requester)
    chosen = PackagesChosen(
        workspace=WS, request=done.request, commit=done.commit, rollouts=(), requester=requester
    )
    return chosen, done


def asked(requester: StreamName) -> CommitRequested:
    return FIRST.model_copy(update={"requester": requester})


async def test_syncs_go_with_their_run_or_when_a_later_one_is_there(app: Application) -> None:
    await begin(app)
    await add_run(app, "r1")
    store = app.services.artifacts
    old, new = [await store.put_artifact(data, run=WS, blob=True) for data in (b"old", b"new")]
    gone, kept = StreamName("eval-gone"), run_stream("r1")
    await append(app, synced(old), asked(gone), synced(old, gone), asked(kept), synced(new, kept))
    rejected = WorkspaceRejected(workspace=WS, request=uuid4(), message="x")
    await append(app, rejected, synced(new), asked(gone), rejected)
    await assert_same(app, "syncs", syncs=4)
    left = await types_in(app, workspace_stream(WS))
    assert left.count(CommitRequested.type) == 3, "the first one, that of the run, the newest"
    assert left.count(WorkspaceSynced.type) == 2
    assert left[-1] == WorkspaceRejected.type

    async def exists(snapshot: ArtifactRef) -> bool:
        key = await app.services.blobs.key(snapshot.uri)
        return await app.services.blobs.exists(key or "") is not None

    await add_effect(app)
    moment = later() + REMOVED_GRACE
    await collect(app.database, app.services.blobs, now=moment)
    assert await exists(old), "the workspace may be about to store it again"
    await app.database.durable.execute("delete from effects")
    await collect(app.database, app.services.blobs, now=moment)
    assert not await exists(old)
    assert await exists(new)
    await collect(app.database, app.services.blobs, now=moment)
    assert await stored(app, "discarded_blobs") == []


async def test_requests_of_commits_that_an_earlier_release_wrote_count_as_such(
    app: Application,
) -> None:
    def pushed(requester: StreamName | None = None) -> OldRepositoryPushed:
        url = CommitSpec(url=URL)
        return OldRepositoryPushed(
            workspace=WS, workspace_name="sums", commit=url, requester=requester
        )

    await app.services.readmodel.names.take("workspace", "sums", WS)
    snapshot = await app.services.artifacts.put_artifact(b"commit", run=WS, blob=True)
    gone = StreamName("eval-gone")
    await append(app, pushed(), synced(snapshot), pushed(gone), synced(snapshot, gone))
    await assert_same(app, "syncs", syncs=0)
    await append(app, asked(gone), synced(snapshot, gone), synced(snapshot))
    await assert_same(app, "syncs", syncs=4)
    assert await types_in(app, workspace_stream(WS)) == [
        CommitRequested.type,
        CommitRequested.type,
        WorkspaceSynced.type,
    ]


async def test_syncs_are_counted_in_events_and_those_of_runs_stay_whole(app: Application) -> None:
    """Each of two runs sees a new commit, which the workspace then fetches for itself too."""
    await begin(app)
    snapshot = await app.services.artifacts.put_artifact(b"commit", run=WS, blob=True)
    await append(app, *sync_of(snapshot))
    for run in ("r1", "r2"):
        await add_run(app, run)
        own = run_stream(run)
        await append(app, asked(own), *sync_of(snapshot, own), *sync_of(snapshot))
    await assert_same(app, "syncs", syncs=5)
    left = [*await types_in(app, workspace_stream(WS))]
    assert left.count(PackagesChosen.type) == 2, "those of the runs"
    assert left.count(WorkspaceSynced.type) == 3, (
        "those of the runs, and the newest of the workspace"
    )
    assert left.count(CommitRequested.type) == 3


async def test_a_snapshot_that_is_stored_again_during_the_collection_is_kept(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspace asks for an old commit just after the collector has read the names of blobs."""
    await begin(app)
    store, blobs = app.services.artifacts, app.services.blobs
    old, new = [await store.put_artifact(data, run=WS, blob=True) for data in (b"old", b"new")]
    await append(app, synced(old), synced(new))
    await assert_same(app, "syncs", syncs=1)
    find_named, syncs = garbage._find_named, list[asyncio.Task[None]]()

    async def sync() -> None:
        await append(app, asked(run_stream("r1")))
        await append(
            app, synced(await store.put_artifact(b"old", run=WS, blob=True), run_stream("r1"))
        )

    async def find_late(database: Database, its: InstalledBlobs, keys: Any) -> set[str]:
        names = await find_named(database, its, keys)
        if await blobs.key(old.uri) in [*keys]:
            syncs.append(asyncio.create_task(sync()))
            await asyncio.wait(syncs, timeout=3)
        return names

    monkeypatch.setattr(garbage, "_find_named", find_late)
    await collect(app.database, blobs, now=later() + REMOVED_GRACE)
    await asyncio.gather(*syncs)
    assert len(syncs) == 1
    key = await blobs.key(old.uri)
    assert await blobs.exists(key or "") is not None


def play(seed: int) -> tuple[list[Event], set[str], set[str]]:
    """What a workspace did in some weeks: its events, the runs that were submitted, and those of them
    that have not ended."""
    dice = random.Random(seed)
    story = given(TRIGGER)
    events: list[Event] = []
    effects: list[Any] = []
    runs: dict[str, PushOrigin] = {}
    open_runs: set[str] = set()
    modes: list[Concurrency] = ["queue", "cancel_previous", "skip"]
    for number in range(1, 26):
        message: Any = moved(number, dice.choice([MAIN, DEV]))
        while message is not None:
            events += [message] if isinstance(message, RefsMoved) else []
            done = story.when(message, stream=trigger_stream(WS))
            story = done.after()
            events += done.events
            effects += done.effects
            message = None
            if effects and dice.random() < 0.8:
                effect = effects.pop(0)
                if isinstance(effect, ExaminePush):
                    mode = modes[seed % 3]
                    found = tuple(match(mode, n) for n in (1, 2) if dice.random() < 0.5)
                    day = f"2026-01-{1 + number // 5:02}"
                    message = PushRead(effect, day=day, matches=found)
                elif dice.random() < 0.2:
                    message = Failed(effect, FailureCategory.VALIDATION, "refused")
                else:
                    runs[effect.origin.run] = effect.origin
                    open_runs.add(effect.origin.run)
                    message = RunSubmitted(effect, run_name="x")
            elif open_runs and dice.random() < 0.7:
                run = dice.choice(sorted(open_runs))
                open_runs.remove(run)
                message = RunStopped(run=run, step=1, origin=runs[run])
    return events, set(runs), open_runs


@pytest.mark.parametrize("seed", range(6))
async def test_any_history_folds_into_the_same_state(app: Application, seed: int) -> None:
    await begin(app)
    events, runs, open_runs = play(seed)
    await append(app, *events)
    dice = random.Random(seed)
    for run in sorted(runs):
        if run in open_runs or dice.random() < 0.3:
            await add_run(app, run)
    before = await workspace_state(app), await trigger_state(app)
    removed = await remove(app, "pushes")
    assert (await workspace_state(app), await trigger_state(app)) == before
    assert removed["pushes"] > 2
    shown = {table: await stored(app, table) for table in TABLES}
    await assert_sound(app)
    assert {table: await stored(app, table) for table in TABLES} == shown


async def test_removers_at_once_share_the_pushes(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.operations.maintenance.records.AT_ONCE", 4)
    await begin(app)
    for number in range(1, 21):
        await append(app, moved(number), examined(number, day=f"d{number}"))
    before = await workspace_state(app), await trigger_state(app)
    answers = await asyncio.gather(
        *(app.services.records.remove(("pushes",), before=later()) for _ in range(3))
    )
    assert sum(one["pushes"] for one in answers) == 19
    assert (await workspace_state(app), await trigger_state(app)) == before
    assert await numbers(app) == [20]
    await assert_sound(app)
