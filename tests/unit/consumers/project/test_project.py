"""How events change the tables of the read model, and that the tables follow from the log alone."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from consumers.project.consumer import Projector, project
from consumers.project.log_lines import LONGEST, narrate
from infra.readmodel.rows import ChangeRun, ChangeWorkspace, PutMetric, PutRun, Write
from infra.readmodel.runs import PageRange
from infra.readmodel.store import ReadModel
from infra.spine.ports.event_log import Cursor, Recorded
from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.notify import Notifier
from infra.spine.postgres.pool import Database
from schemas.events import (
    ALL_EVENTS,
    CommitRequested,
    Event,
    PolicyInitialized,
    RunFailed,
    RunPaused,
    RunResumed,
    RunWarned,
    StepSettled,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.ids import EventId, run_stream
from schemas.specs import CommitSpec, DiscoveredRollout, Entrypoint
from tests.kit.newer import NewerRunWarned, upgrade
from tests.kit.specs import ref, version
from tests.kit.story import WORKSPACE, beginning, whole_run

AT = datetime(2026, 1, 1, tzinfo=UTC)


def recorded(event: Event, position: int = 1) -> Recorded:
    return Recorded(
        id=EventId(uuid4()),
        stream=event.stream,
        version=1,
        cursor=Cursor(7, position),
        time=AT,
        causation=None,
        correlation=uuid4(),
        traceparent=None,
        run=event.run_id,
        payload=event,
    )


def writes(*events: Event) -> list[Write]:
    return [write for event in events for write in project(recorded(event))]


def test_a_request_is_a_pending_run_and_its_push_a_provisioned_one() -> None:
    requested, pushed, *_ = beginning("r1", "a-run", steps=3)
    [put] = [write for write in writes(requested) if isinstance(write, PutRun)]
    assert (put.name, put.algorithm, put.model) == ("a-run", "grpo", "scratch:qwen3-tiny")
    [change] = [write for write in writes(pushed) if isinstance(write, ChangeRun)]
    assert change.phase == "provision"


@pytest.mark.parametrize(
    ("event", "status", "phase"),
    [
        (RunFailed(run="r1", kind="error", message="m"), "failed", "error"),
        (RunFailed(run="r1", kind="crash", message="m"), "crashed", "error"),
        (RunPaused(run="r1", step=2), None, "paused"),
        (RunResumed(run="r1", step=2), None, "train"),
    ],
)
def test_statuses_and_phases_fall_out_of_the_events(
    event: Event, status: str | None, phase: str
) -> None:
    [change] = [write for write in writes(event) if isinstance(write, ChangeRun)]
    assert (change.status, change.phase) == (status, phase)


def test_metrics_that_are_not_finite_have_no_point() -> None:
    metrics = {"a": math.nan, "b": math.inf, "c": 1.0}
    event = StepSettled(run="r1", step=1, state=version(1), metrics=metrics)
    assert [w.key for w in writes(event) if isinstance(w, PutMetric)] == ["c"]


def test_a_run_whose_commit_is_missing_does_not_break_its_workspace() -> None:
    rejected = WorkspaceRejected(
        workspace=WORKSPACE, request=uuid4(), message="no such branch", requester=run_stream("r1")
    )
    assert not [write for write in writes(rejected) if isinstance(write, ChangeWorkspace)]
    [line] = narrate(recorded(rejected))
    assert (line.run, line.level, line.message) == ("r1", "error", "no such branch")
    alone = rejected.model_copy(update={"requester": None})
    [change] = [write for write in writes(alone) if isinstance(write, ChangeWorkspace)]
    assert change.error == "no such branch"


def test_a_workspace_shows_the_last_commit_that_it_looked_at_and_all_rollouts() -> None:
    found = tuple(DiscoveredRollout(entrypoint=Entrypoint(rollout=f"r{n}")) for n in range(7))
    synced = WorkspaceSynced(
        workspace=WORKSPACE, request=uuid4(), commit="b" * 40, snapshot=ref("tree"), rollouts=found
    )
    [change] = [write for write in writes(synced) if isinstance(write, ChangeWorkspace)]
    assert (change.status, change.commit_sha) == ("synced", "b" * 40)
    assert change.rollouts is not None
    assert len(json.loads(change.rollouts)) == 7
    of_a_run = synced.model_copy(update={"requester": run_stream("r1"), "rollouts": found[:1]})
    assert not [write for write in writes(of_a_run) if isinstance(write, ChangeWorkspace)]


def test_a_push_of_the_workspace_is_awaited_by_whoever_adds_it_again() -> None:
    pushed = CommitRequested(
        workspace=WORKSPACE, workspace_name="w", commit=CommitSpec(url="/srv/repo")
    )
    [change] = [write for write in writes(pushed) if isinstance(write, ChangeWorkspace)]
    assert change.status == "syncing"
    of_a_run = pushed.model_copy(update={"requester": run_stream("r1")})
    assert not [write for write in writes(of_a_run) if isinstance(write, ChangeWorkspace)]


def test_rows_that_were_cut_are_told() -> None:
    metrics = {"train/loss": 2.0, "train/truncated_ratio": 0.125, "eval/validation/loss": 2.5}
    settled = StepSettled(run="r1", step=1, state=version(1), metrics=metrics)
    done, cut = narrate(recorded(settled))
    assert done.message == "Step 1 is done: loss 2, held-out loss 2.5"
    assert (cut.level, cut.step) == ("warning", 1)
    assert "12.5% of the rows of step 1" in cut.message
    assert "advanced.max_sequence_length" in cut.message
    whole = settled.model_copy(update={"metrics": {"train/truncated_ratio": 0.0}})
    assert len(narrate(recorded(whole))) == 1
    nothing = settled.model_copy(update={"metrics": {"train/unlearned_ratio": 1.0}})
    _, lost = narrate(recorded(nothing))
    assert lost.message.startswith("100.0% of the rows of step 1 teach nothing")


def test_groups_of_samples_are_no_rows_that_were_cut() -> None:
    """`advanced.max_sequence_length` is not read where samples are learned."""
    metrics = {"train/truncated_ratio": 0.5, "train/unlearned_ratio": 0.5}
    sampled = {"rollout/num_samples": 8.0, "rollout/raw_reward": 0.25, **metrics}
    settled = StepSettled(run="r1", step=1, state=version(1), metrics=sampled)
    (done,) = narrate(recorded(settled))
    assert done.message == "Step 1 is done: reward 0.25"


def test_the_version_before_the_first_step_has_no_line_without_a_metric() -> None:
    before = StepSettled(run="r1", step=0, state=version(0), metrics={})
    assert narrate(recorded(before)) == ()
    (held_out,) = narrate(
        recorded(before.model_copy(update={"metrics": {"eval/validation/loss": 2.5}}))
    )
    assert held_out.message == "Step 0 is done: held-out loss 2.5"


def test_the_log_names_the_gguf_file_of_a_run() -> None:
    *_, initialized = beginning("r1", "a-run", steps=3)
    assert isinstance(initialized, PolicyInitialized)
    assert len(narrate(recorded(initialized))) == 1
    read = initialized.model_copy(update={"versions": {"gguf": "ab" * 32}})
    first, _ = narrate(recorded(read))
    assert first.message == (
        f"The model is a GGUF file (sha256 {'ab' * 32}), dequantized once to float32"
    )


def test_lines_quote_users_in_bounds() -> None:
    [line] = narrate(recorded(RunWarned(run="r1", step=3, message="x" * 9999 + "\0")))
    assert len(line.message) == LONGEST


def test_every_event_can_be_projected() -> None:
    told = {type(event) for event in whole_run("r1", "n", steps=2)}
    assert told <= set(ALL_EVENTS)
    for event in whole_run("r1", "n", steps=2):
        project(recorded(event))


class Breaking:
    """A log whose tail holds one event that cannot be projected."""

    def __init__(self, events: Sequence[Recorded]) -> None:
        self._events = events

    async def tail(self, after: Cursor, *, limit: int) -> tuple[Sequence[Recorded], Cursor]:
        found = [event for event in self._events if event.cursor > after][:limit]
        return found, found[-1].cursor if found else after


@pytest.mark.postgres
async def test_an_event_that_cannot_be_shown_does_not_hide_its_neighbours(
    database: Database,
) -> None:
    told = [recorded(e, n) for n, e in enumerate(beginning("r1", "a-run", steps=3), 1)]
    broken = replace(told[3], payload=told[3].event.model_copy(update={"plan": None}))
    tables = ReadModel(database)
    log: Any = Breaking([*told[:3], broken, *told[4:]])
    await Projector(log, tables).step()
    found = await tables.runs.get_run("r1")
    assert found is not None
    assert found[0]["phase"] == "train"
    summary = await tables.skipped_events.summary()
    assert summary["skipped"] == 1
    [skipped] = summary["skipped_events"]
    assert skipped["event"] == f"{broken.stream}/1"
    assert skipped["type"] == broken.type
    assert skipped["error"].startswith("AttributeError: ")


@pytest.mark.postgres
async def test_a_rebuild_after_the_mend_clears_what_was_skipped(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Notifier(database) as notifier:
        log, tables = PostgresLog(database, notifier), ReadModel(database)
        for event in whole_run("r1", "a-run", steps=1):
            await log.append([event], cause=uuid4())
        projector = Projector(log, tables)
        with monkeypatch.context() as poison:
            poison.setattr("consumers.project.consumer.project", poisoned)
            await caught_up(projector)
        assert await tables.skipped_events.by_type() == {StepSettled.type: 1}
        assert (await everything(database))["metric_points"] == []
        await caught_up(projector)
        assert await tables.skipped_events.by_type() == {StepSettled.type: 1}, "until it is rebuilt"
        await projector.rebuild()
        assert await tables.skipped_events.by_type() == {}
        assert (await everything(database))["metric_points"] != []


@pytest.mark.postgres
async def test_a_newer_projector_projects_what_an_older_one_left(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = NewerRunWarned(run="r1", step=2, message="not seen before")
    async with Notifier(database) as notifier:
        log, tables = PostgresLog(database, notifier), ReadModel(database)
        for event in (*beginning("r1", "a-run", steps=3), newer):
            await log.append([event], cause=uuid4())
        await caught_up(Projector(log, tables))
        assert await tables.skipped_events.by_type() == {newer.type: 1}
        await caught_up(Projector(log, tables))
        assert await tables.skipped_events.by_type() == {newer.type: 1}, "it is still unknown"
        upgrade(monkeypatch)
        await caught_up(Projector(log, tables))
        assert await tables.skipped_events.by_type() == {}
        lines = (await everything(database))["log_lines"]
        assert sum("not seen before" in str(line) for line in lines) == 1


@pytest.mark.postgres
@pytest.mark.parametrize("value", [2**40, -(2**31) - 1])
async def test_a_row_that_the_database_refuses_is_one_skipped_event(
    database: Database, monkeypatch: pytest.MonkeyPatch, value: int
) -> None:
    """The rows of the events around it are written, and the projector goes on."""

    def oversized(recorded: Recorded) -> tuple[Write, ...]:
        if recorded.type == StepSettled.type:
            return (ChangeRun("r1", AT, current_step=value),)
        return project(recorded)

    async with Notifier(database) as notifier:
        log, tables = PostgresLog(database, notifier), ReadModel(database)
        for event in whole_run("r1", "a-run", steps=2):
            await log.append([event], cause=uuid4())
        with monkeypatch.context() as poison:
            poison.setattr("consumers.project.consumer.project", oversized)
            await caught_up(Projector(log, tables))
        assert await tables.skipped_events.by_type() == {StepSettled.type: 2}
        summary = await tables.skipped_events.summary()
        assert summary["behind"] == 0
        assert summary["skipped_events"][0]["error"].startswith("RowsRefused: ")
        skipping = await everything(database)
        await Projector(log, tables).rebuild()
        assert await tables.skipped_events.by_type() == {}
        assert skipping["graded_groups"] == (await everything(database))["graded_groups"] != []


@pytest.mark.postgres
async def test_twin_without_the_record_a_skipped_event_leaves_no_trace(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former behaviour: the failure is only logged, and the read model looks complete."""
    monkeypatch.setattr("consumers.project.consumer.project", poisoned)
    monkeypatch.setattr("consumers.project.consumer._skipped_event", lambda *_: ChangeRun("r1", AT))
    async with Notifier(database) as notifier:
        log, tables = PostgresLog(database, notifier), ReadModel(database)
        for event in whole_run("r1", "a-run", steps=1):
            await log.append([event], cause=uuid4())
        await caught_up(Projector(log, tables))
        assert (await everything(database))["metric_points"] == []
        assert (await tables.skipped_events.summary())["skipped"] == 0


def poisoned(recorded: Recorded) -> tuple[Write, ...]:
    if isinstance(recorded.event, StepSettled):
        raise ValueError("poison")
    return project(recorded)


async def caught_up(projector: Projector) -> None:
    while await projector.step():
        pass


@pytest.mark.postgres
async def test_the_tables_can_be_built_again_from_the_log(database: Database) -> None:
    async with Notifier(database) as notifier:
        log, tables = PostgresLog(database, notifier), ReadModel(database)
        for number in range(3):
            for event in whole_run(f"r{number}", f"run-{number}", steps=4):
                await log.append([event], cause=uuid4())
        projector = Projector(log, tables)
        while await projector.step():
            pass
        before = await everything(database)
        assert len(before["runs"]) == 3
        assert len(before["metric_points"]) == 24
        assert await projector.rebuild() == 3 * (5 + 4 * 8 + 2)
        assert await everything(database) == before


async def everything(database: Database) -> dict[str, list[tuple[object, ...]]]:
    tables = (
        "runs",
        "metric_points",
        "checkpoints",
        "graded_groups",
        "costs",
        "log_lines",
        "workspaces",
    )
    return {
        table: [
            tuple(row)
            for row in await database.durable.fetch(f"select * from {table} order by 1, 2, 3, 4")
        ]
        for table in tables
    }


@pytest.mark.postgres
async def test_text_that_postgres_cannot_hold_is_replaced(database: Database) -> None:
    told = [*beginning("r1", "a-run", steps=3), RunFailed(run="r1", kind="error", message="a\0b")]
    tables = ReadModel(database)
    log: Any = Breaking([recorded(event, n) for n, event in enumerate(told, 1)])
    await Projector(log, tables).step()
    found = await tables.runs.get_run("r1")
    assert found is not None
    assert found[0]["error"] == "a\ufffdb"


@pytest.mark.postgres
async def test_two_projectors_show_each_event_once(database: Database) -> None:
    async with Notifier(database) as notifier:
        log = PostgresLog(database, notifier)
        one, two = ReadModel(database), ReadModel(database)
        await log.append(list(beginning("r1", "a-run", steps=3))[:1], cause=uuid4())
        events, after = await log.tail(Cursor(), limit=10)
        found = [write for event in events for write in project(event)]
        assert await one.apply(found, before=Cursor(), after=after)
        assert not await two.apply(found, before=Cursor(), after=after)
        assert await two.cursor() == after
        assert (await two.runs.logs("r1", limit=9))[0][0]["message"].startswith("Run a-run")
        assert (await two.run_pages.at_offset(PageRange()))[1] == 1
