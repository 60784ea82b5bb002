"""The contract of every Bus: each consumer gets what it reads, at least once, until acknowledged."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

from infra.spine.bus.reconciler import Delivered
from infra.spine.ports.bus import Bus
from infra.spine.ports.event_log import Commit, EventLog
from schemas.ids import ConsumerName, EventId
from tests.contracts.event_log_suite import warning
from tests.kit.commits import commit_of

WARNED = ["rl.run.warned"]


@dataclass
class BoundBus:
    """A log and a maker of buses over it (each its own subscriber)."""

    log: EventLog
    make: Callable[[], Bus]
    reads_the_log: bool = True
    """Whether it finds in the log what was left. A broker alone does not deliver that again."""


class BusSuite:
    """The contract."""

    async def test_events_reach_who_reads_them_and_acknowledged_ones_do_not_return(
        self, bound: BoundBus
    ) -> None:
        name, run = ConsumerName(uuid4().hex), uuid4().hex
        bus = bound.make()
        await bound.log.commit(commit_of(warning(run, 1), 1))
        seen: list[str] = []
        async with listening(bus, {name: WARNED, ConsumerName("deaf"): ["rl.run.paused"]}) as heard:
            async for batch in heard:
                assert {who for who, _ in batch} == {name}
                seen += [r.event.run_id for _, r in batch]
                await consume(bound.log, bus, batch)
                if run in seen and await bus.is_idle():
                    break
        assert seen.count(run) == 1

    async def test_unacknowledged_events_are_delivered_again(self, bound: BoundBus) -> None:
        name, run = ConsumerName(uuid4().hex), uuid4().hex
        await bound.log.commit(commit_of(warning(run, 1), 1))
        for _ in range(2):
            async with listening(bound.make(), {name: WARNED}) as heard:
                batch = await anext(heard)
            assert batch[0][0] == name

    async def test_events_in_the_inbox_are_not_delivered(self, bound: BoundBus) -> None:
        name, run = ConsumerName(uuid4().hex), uuid4().hex
        (recorded,) = await bound.log.commit(commit_of(warning(run, 1), 1))
        await bound.log.commit(Commit(consumed=((name, EventId(recorded.id)),)))
        await bound.log.commit(commit_of(warning(run, 2), 2))
        async with listening(bound.make(), {name: WARNED}) as heard:
            async for batch in heard:
                mine = [r.version for _, r in batch if r.event.run_id == run]
                if mine:
                    break
        assert mine == [2]

    async def test_events_left_by_a_process_stay_for_another_one(self, bound: BoundBus) -> None:
        """The process that left it goes on, and its watermark stays below."""
        name, run = ConsumerName(uuid4().hex), uuid4().hex
        bus = bound.make()
        await bound.log.commit(commit_of(warning(run, 1), 1))
        async with listening(bus, {name: WARNED}) as heard:
            left = await anext(heard)
            await bus.acknowledge(left, left)
            (second,) = await bound.log.commit(commit_of(warning(run, 2), 2))
            batch = await anext(heard)
            assert second in [recorded for _, recorded in batch]
            await consume(bound.log, bus, batch)
        if bound.reads_the_log:
            async with listening(bound.make(), {name: WARNED}) as heard:
                again = [r.version for _, r in await anext(heard) if r.run == run]
            assert again == [1]

    async def test_events_below_the_watermark_are_not_delivered(self, bound: BoundBus) -> None:
        """Its inbox row may have been deleted, because another process moved the watermark while we
        listened."""
        name, run = ConsumerName(uuid4().hex), uuid4().hex
        bus = bound.make()
        async with listening(bus, {name: WARNED}) as heard:
            await bound.log.commit(commit_of(warning(run, 1), 1))
            await consume(bound.log, bus, await anext(heard))
            (second,) = await bound.log.commit(commit_of(warning(run, 2), 2))
            await bound.log.advance([name], second.cursor)
            await bound.log.commit(commit_of(warning(run, 3), 3))
            assert [r.version for _, r in await anext(heard)] == [3]


@asynccontextmanager
async def listening(
    bus: Bus, consumers: Mapping[ConsumerName, Sequence[str]], *, within_s: float = 90
) -> AsyncIterator[AsyncGenerator[Delivered, None]]:
    """A subscription that is closed in order. The block that uses it has a deadline."""
    async with asyncio.timeout(within_s), aclosing(bus.subscribe(consumers)) as heard:
        yield heard


async def consume(log: EventLog, bus: Bus, batch: Delivered) -> None:
    """Process a batch as the runtime does when no message in it needs a decision."""
    for name, recorded in batch:
        await log.commit(Commit(consumed=((name, EventId(recorded.id)),)))
    await bus.acknowledge(batch)
