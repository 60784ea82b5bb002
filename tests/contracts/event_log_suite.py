"""The contract of every EventLog. Bind it with a fixture `log`; see test_memory.py, test_postgres.py."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID, uuid4

import pytest

from infra.ports.actor import Actor, acting_as
from infra.spine.ports.artifacts import SmallArtifact
from infra.spine.ports.effects import NewEffect
from infra.spine.ports.event_log import (
    Commit,
    CommitMiss,
    CommitRefused,
    Cursor,
    EdgeAppend,
    EdgeAppended,
    EventLog,
    Snapshot,
)
from schemas.effects import FetchCommit
from schemas.envelope import NewerEvent
from schemas.errors import Refused
from schemas.events import MAX_EVENT_BYTES, RunPaused, RunWarned
from schemas.ids import ConsumerName, EventId, StreamName
from schemas.specs import CommitSpec
from tests.kit.commits import commit_of, new_event
from tests.kit.newer import NewerRunWarned, RunForeseen

CONSUMER = ConsumerName("tests")


def warning(run: str, step: int) -> RunWarned:
    return RunWarned(run=run, step=step, message="look")


def new_effect(workspace: str) -> NewEffect:
    fetch = FetchCommit(
        workspace=workspace,
        request=UUID(int=7),
        commit=CommitSpec(url="/nowhere"),
        entrypoints=(),
        requester=f"run-{workspace}",
    )
    stream = StreamName(f"workspace-{workspace}")
    return NewEffect(effect=fetch, consumer=CONSUMER, stream=stream, correlation=uuid4())


async def stream_of(log: EventLog, version: int) -> StreamName:
    """A new stream that has `version` events."""
    run = uuid4().hex
    for step in range(1, version + 1):
        await log.commit(commit_of(warning(run, step), step))
    return warning(run, 1).stream


class EventLogSuite:
    """The contract."""

    async def test_committed_events_are_loaded_in_order(self, log: EventLog) -> None:
        run = uuid4().hex
        written = [(await log.commit(commit_of(warning(run, n), n)))[0] for n in (1, 2, 3)]
        stream = written[0].stream
        loaded = (await log.load({stream: 0}))[stream]
        assert loaded == written
        assert [r.event for r in loaded] == [r.event for r in written]
        assert (await log.load({stream: 2}))[stream] == written[2:]
        unknown = StreamName("run-unknown")
        assert list((await log.load({unknown: 0}))[unknown]) == []

    async def test_streams_are_loaded_in_pages(self, log: EventLog) -> None:
        runs = sorted(uuid4().hex for _ in range(2))
        for run in runs:
            for n in (1, 2, 3):
                await log.commit(commit_of(warning(run, n), n))
        first, second = (warning(run, 1).stream for run in runs)
        page = await log.load({second: 0, first: 1}, limit=3)
        assert {s: [r.version for r in page[s]] for s in page} == {first: [2, 3], second: [1]}
        rest = await log.load({second: 1, first: 3}, limit=3)
        assert {s: [r.version for r in rest[s]] for s in rest} == {first: [], second: [2, 3]}

    async def test_a_stream_knows_its_version(self, log: EventLog) -> None:
        run = uuid4().hex
        for step in (1, 2):
            await log.commit(commit_of(warning(run, step), step))
        stream, unknown = warning(run, 1).stream, StreamName("run-unknown")
        assert dict(await log.versions([stream, unknown])) == {stream: 2, unknown: 0}

    async def test_a_moved_stream_is_stale_and_nothing_is_written(self, log: EventLog) -> None:
        run, other = uuid4().hex, uuid4().hex
        await log.commit(commit_of(warning(run, 1), 1))
        first, second = warning(other, 1), warning(run, 2)
        both = Commit(
            expected={first.stream: 0, second.stream: 0},
            events=(new_event(first, 1), new_event(second, 1)),
        )
        with pytest.raises(CommitMiss) as miss:
            await log.commit(both)
        assert miss.value.kind == "stale"
        assert list((await log.load({first.stream: 0}))[first.stream]) == []

    async def test_a_decision_on_a_moved_stream_is_stale_even_if_it_appends_nothing(
        self, log: EventLog
    ) -> None:
        stream = await stream_of(log, 2)
        nothing, asking = (CONSUMER, EventId(uuid4())), (CONSUMER, EventId(uuid4()))
        for expected in (0, 1, 3):
            for decision in (
                Commit(consumed=(nothing,), expected={stream: expected}),
                Commit(
                    consumed=(asking,),
                    expected={stream: expected},
                    effects=(new_effect(uuid4().hex),),
                ),
            ):
                with pytest.raises(CommitMiss) as miss:
                    await log.commit(decision)
                assert (miss.value.kind, miss.value.what) == ("stale", stream)
        assert await log.filter_consumed([nothing, asking]) == frozenset()
        await log.commit(Commit(consumed=(nothing,), expected={stream: 2}))
        assert (await log.versions([stream]))[stream] == 2

    async def test_a_stream_that_one_reads_and_another_creates_is_stale(
        self, log: EventLog
    ) -> None:
        first = warning(uuid4().hex, 1)
        key = (CONSUMER, EventId(uuid4()))
        await log.commit(commit_of(first, 1))
        with pytest.raises(CommitMiss) as miss:
            await log.commit(Commit(consumed=(key,), expected={first.stream: 0}))
        assert (miss.value.kind, miss.value.what) == ("stale", first.stream)
        assert await log.filter_consumed([key]) == frozenset()

    async def test_to_be_read_creates_no_stream(self, log: EventLog) -> None:
        first = warning(uuid4().hex, 1)
        for _ in range(2):
            await log.commit(Commit(expected={first.stream: 0}))
        assert (await log.versions([first.stream]))[first.stream] == 0
        assert list((await log.load({first.stream: 0}))[first.stream]) == []
        (recorded,) = await log.commit(commit_of(first, 1))
        assert (recorded.version, (await log.versions([first.stream]))[first.stream]) == (1, 1)

    async def test_to_read_takes_nothing_from_who_appends(self, log: EventLog) -> None:
        read, stream = await stream_of(log, 1), await stream_of(log, 1)
        run = stream.removeprefix("run-")
        both = Commit(expected={read: 1, stream: 1}, events=(new_event(warning(run, 2), 2),))
        await log.commit(both)
        await log.commit(commit_of(warning(read.removeprefix("run-"), 2), 2))
        with pytest.raises(CommitMiss) as miss:
            await log.commit(replace(both, expected={read: 1, stream: 2}))
        assert (miss.value.kind, miss.value.what) == ("stale", read)

    async def test_readers_do_not_make_one_another_fail(self, log: EventLog) -> None:
        streams = [
            await stream_of(log, 2),
            StreamName(f"run-{uuid4().hex}"),
            await stream_of(log, 1),
        ]
        commit = Commit(expected=dict(zip(streams, (2, 0, 1), strict=True)))
        async with asyncio.timeout(30):
            await asyncio.gather(*(log.commit(commit) for _ in range(16)))

    async def test_commits_that_read_each_others_streams_never_deadlock(
        self, log: EventLog
    ) -> None:
        pair = sorted([await stream_of(log, 1), await stream_of(log, 1)])
        for step in range(2, 12):
            at = await log.versions(pair)
            commits = [
                Commit(expected=dict(at), events=(new_event(warning(s[4:], step), at[s] + 1),))
                for s in pair
            ]
            ended = await asyncio.gather(*map(log.commit, commits), return_exceptions=True)
            missed = [end.what for end in ended if isinstance(end, CommitMiss)]
            assert len(missed) == 1, ended
            assert set(missed) <= set(pair), "one of them waited for the other, and that one for it"

    async def test_a_message_is_consumed_once(self, log: EventLog) -> None:
        run, key = uuid4().hex, (CONSUMER, EventId(uuid4()))
        await log.commit(commit_of(warning(run, 1), 1, consumed=(key,)))
        with pytest.raises(CommitMiss) as miss:
            await log.commit(commit_of(warning(run, 2), 2, consumed=(key,)))
        assert miss.value.kind == "duplicate"
        other = (CONSUMER, EventId(uuid4()))
        assert await log.filter_consumed([key, other]) == frozenset({key})

    async def test_events_below_the_watermark_are_not_consumed_again(self, log: EventLog) -> None:
        name, other = ConsumerName(uuid4().hex), ConsumerName(uuid4().hex)
        written = [(await log.commit(commit_of(warning(uuid4().hex, n), 1)))[0] for n in (1, 2, 3)]
        ids = [EventId(r.id) for r in written]
        cursors = {EventId(r.id): r.cursor for r in written}
        await log.commit(Commit(consumed=((name, ids[0]),), cursors=cursors))
        await log.advance([name], written[1].cursor)
        stream = await stream_of(log, 1)
        for event_id in ids[:2]:
            again = Commit(
                consumed=((name, event_id), (name, ids[2])),
                cursors=cursors,
                expected={stream: 1},
                events=(new_event(warning(stream[4:], 2), 2),),
            )
            with pytest.raises(CommitMiss) as miss:
                await log.commit(again)
            assert miss.value.kind == "duplicate"
        assert await log.filter_consumed([(name, ids[2])]) == frozenset()
        assert (await log.versions([stream]))[stream] == 1
        await log.commit(Commit(consumed=((name, ids[2]), (other, ids[0])), cursors=cursors))

    async def test_events_of_the_decision_that_consumes_them_lie_above_every_watermark(
        self, log: EventLog
    ) -> None:
        name, appended = ConsumerName(uuid4().hex), new_event(warning(uuid4().hex, 1), 1)
        (last,) = await log.commit(commit_of(warning(uuid4().hex, 1), 1))
        await log.advance([name], last.cursor)
        key = (name, appended.id)
        await log.commit(Commit(consumed=(key,), expected={appended.stream: 0}, events=(appended,)))
        assert await log.filter_consumed([key]) == frozenset({key})

    async def test_an_unknown_effect_is_fenced(self, log: EventLog) -> None:
        effect = uuid4()
        commit = commit_of(warning(uuid4().hex, 1), 1, finished=((effect, 1),))
        with pytest.raises(CommitMiss) as miss:
            await log.commit(commit)
        assert (miss.value.kind, miss.value.what) == ("fenced", str(effect))

    async def test_an_edge_appends_once_per_cause(self, log: EventLog) -> None:
        run, cause = uuid4().hex, uuid4()
        events = [warning(run, 1), warning(run, 2)]
        first = await log.append(events, cause=cause)
        again = await log.append(events, cause=cause)
        assert [r.id for r in first] == [r.id for r in again]
        assert len((await log.load({events[0].stream: 0}))[events[0].stream]) == 2
        await log.append([warning(run, 1)], cause=uuid4())
        assert len((await log.load({events[0].stream: 0}))[events[0].stream]) == 3

    async def test_an_edge_appends_once_however_often_and_whoever_asks(self, log: EventLog) -> None:
        run, cause = uuid4().hex, uuid4()
        events = [warning(run, 1), RunPaused(run=uuid4().hex, step=1)]
        answers = await asyncio.gather(*(log.append(events, cause=cause) for _ in range(16)))
        assert {tuple(r.id for r in answer) for answer in answers} == {
            tuple(r.id for r in answers[0])
        }
        versions = await log.versions([event.stream for event in events])
        assert set(versions.values()) == {1}

    async def test_an_edge_is_remembered_when_everybody_is_far_beyond(self, log: EventLog) -> None:
        run, cause = uuid4().hex, uuid4()
        (first,) = await log.append([warning(run, 1)], cause=cause)
        for n in range(2, 5):
            (last,) = await log.commit(commit_of(warning(run, n), n))
        for name in ("edge", "sync"):
            await log.advance([ConsumerName(name)], last.cursor)
        assert await log.append([warning(run, 1)], cause=cause) == [first]
        assert len((await log.load({first.stream: 0}))[first.stream]) == 4

    async def test_an_edge_leaves_nothing_in_an_inbox(self, log: EventLog) -> None:
        (appended,) = await log.append([warning(uuid4().hex, 1)], cause=uuid4())
        key = (ConsumerName("edge"), EventId(appended.id))
        assert await log.filter_consumed([key]) == frozenset()

    async def test_two_events_of_one_name_under_one_cause_are_refused_at_once(
        self, log: EventLog
    ) -> None:
        run = uuid4().hex
        twice = [RunPaused(run=run, step=1), RunPaused(run=run, step=2)]
        async with asyncio.timeout(30):
            with pytest.raises(ValueError, match=rf"two events .*run-{run}.*a cause of its own"):
                await log.append(twice, cause=uuid4())
        assert (await log.versions([twice[0].stream]))[twice[0].stream] == 0

    async def test_the_tail_goes_on_from_its_cursor(self, log: EventLog) -> None:
        run = uuid4().hex
        _, start = await self._end(log)
        for n in (1, 2, 3):
            await log.commit(commit_of(warning(run, n), n))
        await log.commit(commit_of(RunPaused(run=run, step=3), 4))
        page, cursor = await log.tail(start, limit=2)
        assert [r.version for r in page] == [1, 2]
        rest, end = await log.tail(cursor, limit=10)
        assert [r.version for r in rest] == [3, 4]
        assert await log.tail(end, limit=10) == ([], end)
        paused, after = await log.tail(start, limit=10, types=["rl.run.paused"])
        assert [r.version for r in paused] == [4]
        assert after == end
        bounded, after = await log.tail(start, limit=10, upto=page[0].cursor)
        assert (bounded, after) == (page[:1], page[0].cursor)
        assert await log.tail(after, limit=10, upto=after) == ([], after)

    async def test_its_time_is_by_the_clock_that_stamps_events(self, log: EventLog) -> None:
        before = await log.clock_time()
        (event,) = await log.commit(commit_of(warning(uuid4().hex, 1), 1))
        assert before <= event.time <= await log.clock_time()

    async def test_the_head_is_where_the_tail_ends(self, log: EventLog) -> None:
        run = uuid4().hex
        (first,) = await log.commit(commit_of(warning(run, 1), 1))
        assert await log.visible_head() == first.cursor
        assert not await log.has_events_after(first.cursor)
        (second,) = await log.commit(commit_of(warning(run, 2), 2))
        assert await log.has_events_after(first.cursor)
        assert await log.visible_head() == second.cursor

    async def test_events_are_found_by_their_places(self, log: EventLog) -> None:
        run = uuid4().hex
        written = [(await log.commit(commit_of(warning(run, n), n)))[0] for n in (1, 2, 3)]
        stream = written[0].stream
        found = await log.events_at(
            [(stream, 3), (stream, 1), (stream, 9), (StreamName("run-x"), 1)]
        )
        assert sorted(found, key=lambda r: r.version) == [written[0], written[2]]

    async def test_events_at_places_come_with_who_has_not_consumed_them(
        self, log: EventLog
    ) -> None:
        name, other, run = ConsumerName(uuid4().hex), ConsumerName(uuid4().hex), uuid4().hex
        written = [(await log.commit(commit_of(warning(run, n), n)))[0] for n in (1, 2, 3, 4)]
        await log.commit(Commit(consumed=((name, EventId(written[2].id)),)))
        await log.advance([name], written[0].cursor)
        stream = written[0].stream
        places = {(stream, n): (name, other) for n in (1, 2, 3, 9)} | {(stream, 4): (name,)}
        found = {event.version: (event, who) for event, who in await log.unconsumed_at(places)}
        assert {version: event for version, (event, _) in found.items()} == {
            recorded.version: recorded for recorded in written
        }
        awaiting = {version: who for version, (_, who) in found.items()}
        assert awaiting == {1: {other}, 2: {name, other}, 3: {other}, 4: {name}}

    async def test_unconsumed_is_above_the_watermark_and_without_an_inbox_row(
        self, log: EventLog
    ) -> None:
        name, other, run = ConsumerName(uuid4().hex), ConsumerName(uuid4().hex), uuid4().hex
        written = [(await log.commit(commit_of(warning(run, n), n)))[0] for n in (1, 2, 3, 4)]
        await log.commit(Commit(consumed=((name, EventId(written[2].id)),)))
        await log.advance([name], written[0].cursor)
        messages = [(who, r) for r in written for who in (name, other)]
        unconsumed = await log.unconsumed(messages)
        assert [r.version for who, r in unconsumed if who == name] == [2, 4]
        assert [r.version for who, r in unconsumed if who == other] == [1, 2, 3, 4]
        assert await log.unconsumed([]) == []

    async def _end(self, log: EventLog) -> tuple[int, Cursor]:
        cursor, pages = Cursor(), 0
        while True:
            _, after = await log.tail(cursor, limit=1000)
            if after == cursor:
                return pages, cursor
            cursor, pages = after, pages + 1

    async def test_a_run_is_read_by_type_and_cursor(self, log: EventLog) -> None:
        run = uuid4().hex
        for n in (1, 2):
            await log.commit(commit_of(warning(run, n), n))
        await log.commit(commit_of(RunPaused(run=run, step=2), 3))
        read = await log.read(run, after=Cursor(), limit=10)
        assert [r.version for r in read] == [1, 2, 3]
        assert [r.version for r in await log.read(run, after=read[0].cursor, limit=1)] == [2]
        only = await log.read(run, after=Cursor(), limit=10, types=["rl.run.paused"])
        assert [r.version for r in only] == [3]

    async def test_a_watermark_never_moves_back_and_clears_the_inbox(self, log: EventLog) -> None:
        name = ConsumerName(uuid4().hex)
        assert await log.watermark(name) == Cursor()
        keys = [(name, EventId(uuid4())) for _ in range(2)]
        runs = [uuid4().hex for _ in keys]
        written = [
            (await log.commit(commit_of(warning(run, 1), 1, consumed=(key,))))[0]
            for run, key in zip(runs, keys, strict=True)
        ]
        await log.advance([name], written[1].cursor)
        await log.advance([name], written[0].cursor)
        assert await log.watermark(name) == written[1].cursor
        assert await log.filter_consumed(keys) == frozenset(keys[1:])

    async def test_snapshots_belong_to_a_fold_version(self, log: EventLog) -> None:
        stream = StreamName(f"run-{uuid4().hex}")
        await log.save_snapshot(stream, 1, Snapshot(version=5, state="{}"))
        await log.save_snapshot(stream, 1, Snapshot(version=3, state="old"))
        assert await log.snapshot(stream, 1) == Snapshot(version=5, state="{}")
        assert await log.snapshot(stream, 2) is None

    async def test_one_snapshot_in_so_many_versions_is_kept(self, log: EventLog) -> None:
        stream, other = (StreamName(f"run-{uuid4().hex}") for _ in range(2))
        for version in range(5, 50, 5):
            snapshot = Snapshot(version=version, state=f"{version}")
            await log.save_snapshot(stream, 1, snapshot, keep_every=20)
            await log.save_snapshot(other, 1, snapshot)
        newest = {upto: await log.snapshot(stream, 1, upto=upto) for upto in (4, 19, 39, 44, 45)}
        kept = {upto: found and found.version for upto, found in newest.items()}
        assert kept == {4: None, 19: 5, 39: 20, 44: 40, 45: 45}
        assert await log.snapshot(stream, 1) == Snapshot(version=45, state="45")
        assert await log.snapshot(other, 1, upto=44) is None, "others keep the newest only"

    async def test_small_artifacts_come_with_their_commit(self, log: EventLog) -> None:
        sha = uuid4().hex * 2
        await log.commit(
            commit_of(warning(uuid4().hex, 1), 1, artifacts=(SmallArtifact(sha, b"\0bytes"),))
        )
        assert await log.artifact(sha) == b"\0bytes"
        assert await log.artifact("0" * 64) is None

    async def test_a_commit_that_the_database_cannot_hold_is_refused_permanently(
        self, log: EventLog
    ) -> None:
        event, key = warning(uuid4().hex, 1), (CONSUMER, EventId(uuid4()))
        good = new_event(event, 1)
        for wrong in ("a\0b", "\ud800"):
            traced = replace(good, traceparent=wrong)
            for refused in (
                Commit(consumed=(key,), expected={event.stream: 0}, events=(traced,)),
                Commit(consumed=(key,), effects=(replace(new_effect("w"), traceparent=wrong),)),
                Commit(
                    consumed=(key,), effects=(replace(new_effect("w"), stream=StreamName(wrong)),)
                ),
            ):
                with pytest.raises(CommitRefused, match="cannot hold it"):
                    await log.commit(refused)
        assert await log.filter_consumed([key]) == frozenset()
        await log.commit(commit_of(event, 1, consumed=(key,)))

    async def test_an_event_that_is_no_text_is_refused(self, log: EventLog) -> None:
        broken = warning(uuid4().hex, 1).model_copy(update={"message": "\ud800"})
        with pytest.raises(Refused, match="cannot be written") as refused:
            await log.commit(commit_of(broken, 1))
        assert getattr(refused.value, "event", None) is broken

    async def test_the_tail_has_what_only_a_newer_release_knows_and_a_reader_leaves_it_out(
        self, log: EventLog
    ) -> None:
        run = uuid4().hex
        start = await log.visible_head()
        kinds = (RunForeseen, RunWarned, NewerRunWarned)
        for step, kind in enumerate(kinds, 1):
            await log.commit(commit_of(kind(run=run, step=step, message="look"), step))
        page, _ = await log.tail(start, limit=1000)
        ours = [(r.version, r.is_known) for r in page if r.run == run]
        assert ours == [(1, False), (2, True), (3, False)]
        with pytest.raises(NewerEvent):
            _ = next(r for r in page if r.run == run).event
        assert [r.version for r in await log.read(run, after=Cursor(), limit=9)] == [2]

    async def test_an_event_that_is_too_large_is_refused(self, log: EventLog) -> None:
        run = uuid4().hex
        for text in ("x" * 70_000, "\N{CJK UNIFIED IDEOGRAPH-6E20}" * 22_000):
            event = RunWarned(run=run, step=1, message=text)
            with pytest.raises(Refused, match="65536"):
                await log.commit(commit_of(event, 1))
            assert list((await log.load({event.stream: 0}))[event.stream]) == []

    async def test_an_event_may_have_64_kib(self, log: EventLog) -> None:
        event = RunWarned(run=uuid4().hex, step=1, message="")
        room = MAX_EVENT_BYTES - len(event.model_dump_json().encode())
        largest = event.model_copy(update={"message": "é" * (room // 2) + "x" * (room % 2)})
        await log.commit(commit_of(largest, 1))
        larger = largest.model_copy(update={"message": largest.message + "x"})
        with pytest.raises(Refused, match="65537 bytes"):
            await log.commit(commit_of(larger, 2))

    async def test_a_log_reaches_to_its_last_event_and_no_further(self, log: EventLog) -> None:
        assert await log.reaches(Cursor())
        (recorded,) = await log.append([warning(uuid4().hex, 1)], cause=uuid4())
        assert await log.reaches(recorded.cursor)
        assert not await log.reaches(Cursor(2**40, 1))

    async def test_many_causes_are_appended_in_one_commit(self, log: EventLog) -> None:
        runs = [uuid4().hex for _ in range(3)]
        batch = [EdgeAppend(warning(run, n), uuid4(), None) for n in (1, 2, 3) for run in runs]
        results = await log.append_all(batch)
        recorded = [result.recorded for result in appended_in(results)]
        assert [r.event for r in recorded] == [entry.event for entry in batch]
        assert [r.causation for r in recorded] == [entry.cause for entry in batch]
        assert [r.version for r in recorded] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert len({r.cursor.xid for r in recorded}) == 1
        assert all(result.is_new for result in appended_in(results))
        assert await log.append_all([]) == []

    async def test_an_event_names_the_actor_of_the_request_that_appended_it(
        self, log: EventLog
    ) -> None:
        run = uuid4().hex
        [nobodys] = await log.append([warning(run, 1)], cause=uuid4())
        with acting_as(Actor("t1", "ada", frozenset({"admin"}), address="192.0.2.1")):
            [hers] = await log.append([warning(run, 2)], cause=uuid4())
            # A group is written for several requests, so each of its entries has an actor of its own.
            batch = [EdgeAppend(warning(run, 3), uuid4(), None, "forge/webhook@192.0.2.2")]
            [theirs, others] = appended_in(
                await log.append_all([*batch, EdgeAppend(warning(run, 4), uuid4())])
            )
        await log.commit(commit_of(warning(run, 5), 5))
        loaded = (await log.load({nobodys.stream: 0}))[nobodys.stream]
        actors = [None, "ada/t1@192.0.2.1", "forge/webhook@192.0.2.2", None, None]
        assert [recorded.actor for recorded in loaded] == actors
        assert [nobodys.actor, hers.actor, theirs.recorded.actor] == actors[:3]
        assert others.recorded.actor is None

    async def test_a_group_appends_once_per_cause(self, log: EventLog) -> None:
        run, cause = uuid4().hex, uuid4()
        [first] = await log.append([warning(run, 1)], cause=cause)
        other = EdgeAppend(warning(run, 2), uuid4())
        known = EdgeAppend(warning(run, 1), cause)
        results = appended_in(await log.append_all([other, known, other]))
        assert [result.is_new for result in results] == [True, False, False]
        assert results[1].recorded == first
        assert results[0].recorded == results[2].recorded
        assert len((await log.load({first.stream: 0}))[first.stream]) == 2
        again = appended_in(await log.append_all([known, other]))
        assert [result.is_new for result in again] == [False, False]

    async def test_groups_at_the_same_time_append_once_per_cause(self, log: EventLog) -> None:
        run = uuid4().hex
        entries = [EdgeAppend(warning(run, n), uuid4()) for n in range(1, 6)]
        rounds = await asyncio.gather(
            *(log.append_all([*entries[n % 5 :], *entries[: n % 5]]) for n in range(10))
        )
        stream = warning(run, 1).stream
        loaded = (await log.load({stream: 0}))[stream]
        assert sorted(r.causation for r in loaded if r.causation) == sorted(
            e.cause for e in entries
        )
        assert [r.version for r in loaded] == [1, 2, 3, 4, 5]
        assert sum(result.is_new for results in rounds for result in appended_in(results)) == 5

    async def test_a_refused_entry_holds_up_no_other(self, log: EventLog) -> None:
        run = uuid4().hex
        large = RunWarned(run=run, step=9, message="x" * MAX_EVENT_BYTES)
        nul = RunWarned(run="a\0b", step=9, message="x")
        bad = [EdgeAppend(large, uuid4()), EdgeAppend(nul, uuid4())]
        good = [EdgeAppend(warning(run, n), uuid4()) for n in range(1, 8)]
        results = await log.append_all([*good[:3], bad[0], *good[3:5], bad[1], bad[1], *good[5:]])
        assert [isinstance(result, Refused) for result in results] == [
            *(False, False, False, True, False, False, True, True, False, False)
        ]
        stream = warning(run, 1).stream
        assert len((await log.load({stream: 0}))[stream]) == 7


def appended_in(results: Sequence[EdgeAppended | Refused]) -> list[EdgeAppended]:
    """The results, none of which is a refusal."""
    found = [result for result in results if isinstance(result, EdgeAppended)]
    assert len(found) == len(results), results
    return found
