"""What every Bus does: at least once, until acknowledged, to each consumer what it reads."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from infra.ports import Bus, Commit, EventLog
from schemas.ids import ConsumerName, EventId
from tests.contracts.event_log_suite import one, warned

WARNED = ["rl.run.warned"]


@dataclass
class BoundBus:
    """A log and a maker of buses over it (each its own subscriber)."""

    log: EventLog
    make: Callable[[], Bus]


class BusSuite:
    """The laws of the bus."""

    async def test_events_reach_who_reads_them_and_acknowledged_ones_do_not_return(
        self, bound: BoundBus
    ) -> None:
        name, run = ConsumerName(uuid4().hex), uuid4().hex
        bus = bound.make()
        batches = bus.subscribe({name: WARNED, ConsumerName("deaf"): ["rl.run.paused"]})
        await bound.log.commit(one(warned(run, 1), 1))
        seen: list[str] = []
        async with asyncio.timeout(20):
            async for batch in batches:
                assert {who for who, _ in batch} == {name}
                seen += [r.event.run_id for _, r in batch]
                for who, recorded in batch:
                    await bound.log.commit(Commit(consumed=((who, recorded.id),)))
                await bus.acknowledge(batch)
                if run in seen and await bus.idle():
                    break
        assert seen.count(run) == 1

    async def test_what_was_not_acknowledged_comes_again(self, bound: BoundBus) -> None:
        name, run = ConsumerName(uuid4().hex), uuid4().hex
        await bound.log.commit(one(warned(run, 1), 1))
        for _ in range(2):
            async with asyncio.timeout(20):
                async for batch in bound.make().subscribe({name: WARNED}):
                    assert batch[0][0] == name
                    break

    async def test_what_the_inbox_holds_is_not_delivered(self, bound: BoundBus) -> None:
        name, run = ConsumerName(uuid4().hex), uuid4().hex
        (recorded,) = await bound.log.commit(one(warned(run, 1), 1))
        await bound.log.commit(Commit(consumed=((name, EventId(recorded.id)),)))
        await bound.log.commit(one(warned(run, 2), 2))
        async with asyncio.timeout(20):
            async for batch in bound.make().subscribe({name: WARNED}):
                mine = [r.version for _, r in batch if r.event.run_id == run]
                if mine:
                    break
        assert mine == [2]
