"""The relay is killed wherever it may be, as a real process: every event is on the topic at least once,
and the events of a key in order. Its twin moves its position before the acknowledgement, and loses.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiokafka.structs import ConsumerRecord

from infra.settings.kafka import KafkaSettings
from infra.spine.ports.event_log import Recorded
from tests.kit.broker_fixture import BrokerFixture, open_broker_fixture
from tests.kit.kafka import settings, variables
from tests.kit.platform import ROOT
from tests.stack.kafka import KafkaServer

pytestmark = [pytest.mark.processes, pytest.mark.kafka, pytest.mark.postgres]

POINTS = ("relay.before_send", "relay.after_send", "relay.after_ack", "relay.after_position")
RELAY = ("consumers", "relay")
EARLY_ACK = ("tests.crash.early_ack_relay",)


@pytest.fixture
async def here(database_url: str, kafka: KafkaSettings) -> AsyncIterator[BrokerFixture]:
    async with open_broker_fixture(database_url, kafka) as found:
        yield found


@contextmanager
def relay(
    here: BrokerFixture, home: Path, failpoint: str = "", *, program: tuple[str, ...] = RELAY
) -> Iterator["subprocess.Popen[bytes]"]:
    """A relay's process; killed at the end, when it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", *program],
        cwd=ROOT,
        env={
            **os.environ,
            **variables(here.kafka),
            "HEADRACE_DATABASE_URL": here.database.url,
            "HEADRACE_HOME": str(home),
            "HEADRACE_FAILPOINT": failpoint,
            "PYTHONPATH": str(ROOT),
        },
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


async def died(process: "subprocess.Popen[bytes]") -> None:
    assert await asyncio.to_thread(process.wait, 40) == -signal.SIGKILL


async def published(here: BrokerFixture, events: Iterable[Recorded]) -> list[ConsumerRecord]:
    """The topic, once all of these are on it."""
    wanted = {str(event.id) for event in events}
    async with asyncio.timeout(120):
        while True:
            records = await here.records() if await present(here) else []
            if wanted <= {header(record, "ce_id") for record in records}:
                return records
            await asyncio.sleep(0.1)


async def present(here: BrokerFixture) -> bool:
    """Whether the topics are made already."""
    row = await here.database.lazy.fetchrow("select cluster from relay")
    return row is not None


def header(record: ConsumerRecord, name: str) -> str:
    return str(dict(record.headers)[name].decode())


def in_order(records: Iterable[ConsumerRecord], run: str) -> bool:
    """Whether the versions of a stream appear in their order; what appears again does not count."""
    seen: list[int] = []
    for record in records:
        version = int(header(record, "ce_streamversion"))
        if header(record, "ce_runid") == run and version not in seen:
            seen.append(version)
    return seen == sorted(seen)


@pytest.mark.kills
@pytest.mark.parametrize("point", POINTS)
async def test_a_relay_that_is_killed_loses_nothing_and_keeps_the_order(
    here: BrokerFixture, tmp_path: Path, point: str
) -> None:
    runs = ("a", "b", "c")
    events = [e for run in runs for e in await here.warn_run(run, 1, 10)]
    with relay(here, tmp_path, f"{point}:2") as first:
        await published(here, events)
        for run in runs:
            events += await here.warn_run(run, 11, 10)
        await died(first)
    for run in runs:
        events += await here.warn_run(run, 21, 10)
    with relay(here, tmp_path):
        records = await published(here, events)
    assert all(in_order(records, run) for run in runs)
    assert {header(record, "ce_type") for record in records} == {"rl.run.warned"}


async def lost_by(
    program: tuple[str, ...], point: str, here: BrokerFixture, node: KafkaServer, home: Path
) -> set[str]:
    """A relay hands events over to a broker that is dead, and dies; then both come back, the relay as it
    should be. Which events never reach the topic?"""
    events = await here.warn_run("a", 1, 3)
    with relay(here, home, f"{point}:2", program=program) as first:
        await published(here, events)
        await asyncio.to_thread(node.kill)
        events += await here.warn_run("a", 4, 3)
        await died(first)
    await asyncio.to_thread(node.start)
    (marker,) = await here.warn_run("a", 7, 1)
    with relay(here, home):
        records = await published(here, [marker])
    return {str(event.id) for event in events} - {header(r, "ce_id") for r in records}


@pytest.fixture
async def on_our_node(database_url: str, kafka_node: KafkaServer) -> AsyncIterator[BrokerFixture]:
    async with open_broker_fixture(database_url, settings(kafka_node.bootstrap)) as found:
        yield found


async def test_events_sent_to_a_broker_that_died_are_sent_again(
    on_our_node: BrokerFixture, kafka_node: KafkaServer, tmp_path: Path
) -> None:
    assert not await lost_by(RELAY, "relay.after_send", on_our_node, kafka_node, tmp_path)


async def test_twin_a_position_moved_before_the_acknowledgement_loses_events(
    on_our_node: BrokerFixture, kafka_node: KafkaServer, tmp_path: Path
) -> None:
    lost = await lost_by(EARLY_ACK, "relay.after_ack", on_our_node, kafka_node, tmp_path)
    assert len(lost) == 3


async def test_one_relay_is_active_and_another_takes_over(
    here: BrokerFixture, tmp_path: Path
) -> None:
    events = await here.warn_run("a", 1, 3)
    with relay(here, tmp_path) as first:
        await published(here, events)
        with relay(here, tmp_path) as second:
            holders = "select count(*) from pg_locks where locktype = 'advisory' and granted"
            assert await here.database.lazy.fetchval(holders) == 1
            first.kill()
            events += await here.warn_run("a", 4, 3)
            records = await published(here, events)
            assert second.poll() is None
    assert in_order(records, "a")
