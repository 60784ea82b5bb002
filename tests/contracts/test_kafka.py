"""Kafka with its relay keeps the contract of a bus, and faults that only a broker can cause change
nothing: members that come and go, records that arrive ten times, a broker that is killed or comes
back empty."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import pytest

from infra.settings.kafka import KafkaSettings
from infra.spine.bus.kafka.publisher import open_publisher
from infra.spine.bus.reconciler import Delivered
from infra.spine.bus.relay import Position, acquire_leadership
from infra.spine.ports.bus import Bus
from tests.contracts.bus_suite import BoundBus, BusSuite, listening
from tests.kit.broker_fixture import BrokerFixture, consume, open_broker_fixture, reader
from tests.kit.kafka import settings
from tests.stack.kafka import KafkaServer

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]


@pytest.fixture
async def here(database_url: str, kafka: KafkaSettings) -> AsyncIterator[BrokerFixture]:
    async with open_broker_fixture(database_url, kafka) as found:
        yield found


@pytest.fixture
async def on_our_node(database_url: str, kafka_node: KafkaServer) -> AsyncIterator[BrokerFixture]:
    """On the broker that tests may kill."""
    async with open_broker_fixture(database_url, settings(kafka_node.bootstrap)) as found:
        yield found


class TestKafka(BusSuite):
    @pytest.fixture(params=["alone", "reconciled"])
    async def bound(
        self, request: pytest.FixtureRequest, here: BrokerFixture
    ) -> AsyncIterator[BoundBus]:
        def make() -> Bus:
            return here.bus() if request.param == "alone" else here.reconciled()

        async with here.relaying():
            yield BoundBus(here.log, make, reads_the_log=request.param == "reconciled")


class Member:
    """A process of a consumer group, which consumes in the background and remembers the messages
    that it processed itself."""

    def __init__(
        self, here: BrokerFixture, bus: Bus, heard: AsyncGenerator[Delivered, None]
    ) -> None:
        self._here = here
        self._bus = bus
        self._heard = heard
        self.done: list[object] = []
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        async with aclosing(self._heard) as heard:
            async for batch in heard:
                self.done += [r.id for r in await consume(self._here.log, self._bus, batch)]

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def until(what: Callable[[], bool], *, within_s: float = 120) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(within_s):
        while not what():
            await asyncio.sleep(0.02)


async def test_members_that_come_and_go_lose_nothing_and_stall_nothing(here: BrokerFixture) -> None:
    group, events = reader(), []
    members: list[Member] = []

    def join() -> Member:
        bus = here.bus()
        members.append(Member(here, bus, bus.subscribe(group)))
        return members[-1]

    def done() -> list[object]:
        return [event for member in members for event in member.done]

    async with here.relaying():
        first = join()
        events += await here.warn(20)
        await until(lambda: len(done()) == 20)
        second = join()
        events += await here.warn(40)
        await until(lambda: len(done()) == 60)
        while not second.done:
            events += await here.warn(5)
            await asyncio.sleep(0.1)
        await first.leave()
        events += await here.warn(20)
        await until(lambda: len(done()) == len(events))
        await second.leave()
    assert sorted(map(str, done())) == sorted(str(event.id) for event in events)


async def test_a_record_that_comes_ten_times_is_delivered_once(here: BrokerFixture) -> None:
    (event,) = await here.warn()
    async with here.relaying():
        group, bus = reader(), here.bus()
        async with listening(bus, group) as heard:
            await consume(here.log, bus, await anext(heard))
            [record] = await here.records()
            for _ in range(10):
                await here.produce(record.value, dict(record.headers), key=record.key)
            (marker,) = await here.warn()
            seen = [r.id for _, r in await anext(heard)]
        assert seen == [marker.id]
        async with listening(here.bus(), reader()) as heard:
            fresh = [r.id for _, r in await anext(heard)]
        assert fresh.count(event.id) == 1


async def test_lag_is_what_a_group_has_not_acknowledged(here: BrokerFixture) -> None:
    group = reader()
    [name] = group
    bus = here.bus()
    async with here.relaying():
        events = await here.warn(12)
        member = Member(here, bus, bus.subscribe(group))
        await until(lambda: len(member.done) == len(events))
        await member.leave()
        async with open_publisher(here.kafka) as publisher:
            assert (await publisher.read_lags())[name] == 0
            await here.warn(3)
            async with asyncio.timeout(60):
                while (await publisher.read_lags())[name] != 3:
                    await asyncio.sleep(0.05)


async def test_a_broker_that_is_killed_and_comes_back_brings_what_was_appended_meanwhile(
    on_our_node: BrokerFixture, kafka_node: KafkaServer
) -> None:
    here = on_our_node
    bus = here.bus()
    member = Member(here, bus, bus.subscribe(reader()))
    async with here.relaying():
        events = await here.warn(10)
        await until(lambda: len(member.done) == 10)
        await asyncio.to_thread(kafka_node.kill)
        events += await here.warn(10)
        await asyncio.to_thread(kafka_node.start)
        events += await here.warn(10)
        await until(lambda: len(member.done) == 30, within_s=180)
        await member.leave()
    assert {str(i) for i in member.done} == {str(event.id) for event in events}


@pytest.mark.parametrize("same_cluster", [False, True], ids=["another-cluster", "same-cluster-id"])
async def test_a_broker_that_comes_back_empty_is_given_everything_again(
    on_our_node: BrokerFixture, kafka_node: KafkaServer, same_cluster: bool
) -> None:
    here = on_our_node
    bus = here.bus()
    member = Member(here, bus, bus.subscribe(reader()))
    async with here.relaying():
        events = await here.warn(10)
        await until(lambda: len(member.done) == 10)
        await asyncio.to_thread(kafka_node.kill)
        events += await here.warn(10)
        known = kafka_node.cluster_id if same_cluster else None
        await asyncio.to_thread(kafka_node.wipe, cluster_id=known)
        await asyncio.to_thread(kafka_node.start)
        events += await here.warn(10)
        await until(lambda: len(member.done) == 30, within_s=180)
        held = await here.records()
        await member.leave()
    assert {str(i) for i in member.done} == {str(event.id) for event in events}
    assert {dict(r.headers)["ce_id"].decode() for r in held} == {str(e.id) for e in events}


async def brought_of_what_the_relay_passed_over(
    here: BrokerFixture, bus: Bus, *, until: Callable[[set[object]], bool]
) -> set[object]:
    """The relay's position is past an event that it never published (its row was lost, or a bug
    moved the position). Returns which of two events a bus delivers: the lost one ("lost") and a
    published one ("sent")."""
    (lost,) = await here.warn()
    async with (
        open_publisher(here.kafka) as publisher,
        acquire_leadership(here.database.url) as leadership,
    ):
        await leadership.save_position(
            Position(lost.cursor, publisher.cluster, dict(publisher.ends))
        )
    brought: set[object] = set()
    async with here.relaying(), listening(bus, reader()) as heard, asyncio.timeout(120):
        (sent,) = await here.warn()
        names = {lost.id: "lost", sent.id: "sent"}
        while not until(brought):
            brought |= {names[r.id] for r in await consume(here.log, bus, await anext(heard))}
    assert [dict(r.headers)["ce_id"].decode() for r in await here.records()] == [str(sent.id)]
    return brought


async def test_the_reconciler_delivers_events_that_kafka_never_received(
    here: BrokerFixture,
) -> None:
    both = {"lost", "sent"}
    await brought_of_what_the_relay_passed_over(
        here, here.reconciled(wait_s=0.5), until=lambda brought: brought == both
    )


async def test_twin_without_the_reconciler_nobody_brings_it(here: BrokerFixture) -> None:
    """The later event has arrived and the topic holds no other, so nothing more can arrive."""
    brought = await brought_of_what_the_relay_passed_over(
        here, here.bus(), until=lambda brought: "sent" in brought
    )
    assert brought == {"sent"}
