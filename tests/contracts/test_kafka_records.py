"""Foreign or damaged records are skipped and counted, or become a dead letter with their bytes and
headers. None blocks its neighbours, and every event is delivered as the log holds it."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from uuid import uuid4

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from infra.settings.kafka import KafkaSettings
from infra.spine.bus.kafka.connect import client_options
from infra.spine.bus.kafka.intake import DAMAGED, FOREIGN_TYPE, NOT_IN_THE_LOG, UNREADABLE
from infra.spine.bus.kafka.records import to_record
from infra.spine.bus.kafka.unusable_records import CONSUMER
from infra.spine.ports.event_log import Cursor, Recorded
from schemas.events import MessageDeadLettered
from schemas.ids import dead_letter_stream
from tests.contracts.bus_suite import listening
from tests.kit.broker_fixture import BrokerFixture, consume, open_broker_fixture, reader

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
GOOD = b'{"run":"r","step":1,"message":"m"}'


@pytest.fixture
async def here(database_url: str, kafka: KafkaSettings) -> AsyncIterator[BrokerFixture]:
    """A topic of one partition, so that every record is followed directly by the next."""
    async with (
        open_broker_fixture(database_url, replace(kafka, partitions=1)) as found,
        found.relaying(),
    ):
        yield found


async def delivered_around(
    here: BrokerFixture, value: bytes | None, headers: Mapping[str, str | bytes]
) -> None:
    """A record lies between two events of ours: both are delivered, and nothing else."""
    known = {record.id for record in (await here.log.tail(Cursor(), limit=1000))[0]}
    async with listening(bus := here.bus(), reader()) as heard:
        (before,) = await here.warn()
        seen: list[Recorded] = []
        while before not in seen:
            seen += await consume(here.log, bus, await anext(heard))
        await here.produce(value, headers)
        (after,) = await here.warn()
        while after not in seen:
            seen += await consume(here.log, bus, await anext(heard))
    assert {r.id for r in seen} - known == {before.id, after.id}


async def dead_letters(here: BrokerFixture) -> list[MessageDeadLettered]:
    stream = dead_letter_stream(CONSUMER)
    found = (await here.log.load({stream: 0}))[stream]
    return [r.event for r in found if isinstance(r.event, MessageDeadLettered)]


def headers(**changes: str | bytes | None) -> dict[str, str | bytes]:
    """The headers of a warning that the log does not hold, with changes (None removes a header)."""
    attributes: dict[str, str | bytes | None] = {
        "ce_specversion": "1.0",
        "ce_id": str(uuid4()),
        "ce_source": "headrace",
        "ce_type": "rl.run.warned",
        "ce_subject": "run-r",
        "ce_dataversion": "1",
        "ce_streamversion": "1",
        "ce_runid": "r",
        "traceparent": TRACE,
    }
    return {name: value for name, value in (attributes | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("value", "changes", "says"),
    [
        (b"hello", dict.fromkeys(headers()), "no header ce_id"),
        (GOOD, {"ce_id": "17"}, "ce_id is not a UUID"),
        (GOOD, {"ce_id": b"\xff\x00"}, "ce_id is not a UUID"),
        (GOOD, {"ce_type": None}, "no header ce_type"),
        (GOOD, {"ce_streamversion": "-1"}, "ce_streamversion is not a number"),
        (GOOD, {"ce_streamversion": "9" * 400}, "ce_streamversion is not a number"),
        (GOOD, {"ce_dataversion": "one"}, "ce_dataversion is not a number"),
        (GOOD[:12], {}, "rl.run.warned version 1"),
        (b'{"step":"x"}', {}, "rl.run.warned version 1"),
        (b"\xff\xfe" + GOOD, {}, "rl.run.warned version 1"),
        (None, {}, "rl.run.warned version 1"),
        (b"[" * 60_000, {"ce_dataversion": "0"}, "rl.run.warned version 0"),
        (GOOD, {"ce_dataversion": "7"}, "version 7"),
        (b"\x00\x01" * 100_000, {"ce_runid": "\x00" * 900}, "rl.run.warned version 1"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
async def test_a_record_that_cannot_be_read_is_a_dead_letter(
    here: BrokerFixture, value: bytes | None, changes: Mapping[str, str | bytes | None], says: str
) -> None:
    sent = headers(**changes)
    for _ in range(2):
        await delivered_around(here, value, sent)
    [letter] = await dead_letters(here)
    assert says in letter.cause
    assert letter.cause.startswith(f"{here.topic}[0]@")
    assert (value or b"").decode(errors="backslashreplace").startswith(letter.payload)
    assert letter.headers.get("traceparent") == sent.get("traceparent")
    assert letter.traceparent == sent.get("traceparent")
    assert here.skips.counts[UNREADABLE] >= 2


async def test_ten_megabytes_are_a_dead_letter_with_their_beginning(here: BrokerFixture) -> None:
    await here.warn()
    admin = AIOKafkaAdminClient(**client_options(here.kafka))
    async with listening(here.bus(), reader()) as heard:
        await anext(heard)
    await admin.start()
    await admin.alter_configs(
        [ConfigResource(ConfigResourceType.TOPIC, here.topic, {"max.message.bytes": str(16 << 20)})]
    )
    await admin.close()
    await delivered_around(here, b"z" * (10 << 20), headers())
    [letter] = await dead_letters(here)
    assert letter.payload == "z" * len(letter.payload)
    assert str(10 << 20) in letter.cause
    assert letter.content is not None
    assert await here.log.artifact(letter.content.sha256) == b"z" * (1 << 20)


async def test_a_foreign_type_is_skipped_and_counted(here: BrokerFixture) -> None:
    await delivered_around(here, b"<order/>", headers(ce_type="com.example.order"))
    assert here.skips.counts == {FOREIGN_TYPE: 1}
    assert not await dead_letters(here)
    row = await here.database.lazy.fetchrow("select reason, count from bus_skips")
    assert (row["reason"], row["count"]) == (FOREIGN_TYPE, 1)


async def test_an_event_that_the_log_does_not_hold_decides_nothing(here: BrokerFixture) -> None:
    """A record that is forged, from another installation, or from a past that a restore removed."""
    await delivered_around(here, GOOD, headers())
    assert here.skips.counts == {NOT_IN_THE_LOG: 1}
    assert not await dead_letters(here)


async def test_another_id_in_the_place_of_an_event_decides_nothing(here: BrokerFixture) -> None:
    (event,) = await here.warn()
    forged = dict(to_record(event, here.kafka).headers) | {"ce_id": str(uuid4()).encode()}
    await delivered_around(here, GOOD, forged)
    assert here.skips.counts == {NOT_IN_THE_LOG: 1}


@pytest.mark.parametrize("body", [b"", b'{"run":', b"\xff\xff", GOOD])
async def test_a_damaged_copy_of_an_event_loses_nothing(here: BrokerFixture, body: bytes) -> None:
    """The log's own event is delivered, whatever arrives earlier under its id."""
    async with listening(bus := here.bus(), reader()) as heard:
        (event,) = await here.warn()
        await consume(here.log, bus, await anext(heard))
    copy = to_record(event, here.kafka)
    await here.produce(body, dict(copy.headers), key=copy.key)
    seen: list[Recorded] = []
    async with listening(bus := here.bus(), reader()) as heard:
        while not here.skips.counts:
            seen += await consume(here.log, bus, await anext(heard))
            await here.warn()
    assert event in seen
    assert [r.event for r in seen if r.id == event.id] == [event.event]
    assert here.skips.counts == {DAMAGED: 1}
    assert not await dead_letters(here)


async def test_a_record_says_what_cloudevents_say_in_binary_mode(here: BrokerFixture) -> None:
    (event,) = await here.warn()
    async with listening(here.bus(), reader()) as heard:
        await anext(heard)
    [found] = await here.records()
    said = {name: value.decode() for name, value in found.headers}
    assert said == {
        "ce_specversion": "1.0",
        "ce_id": str(event.id),
        "ce_source": "headrace",
        "ce_type": "rl.run.warned",
        "ce_subject": event.stream,
        "ce_time": event.time.isoformat(),
        "ce_dataversion": "1",
        "ce_streamversion": "1",
        "ce_runid": event.run,
        "ce_correlationid": str(event.correlation),
        "ce_cursor": str(event.cursor),
        "content-type": "application/json",
    }
    assert found.key == event.event.key.encode()
    assert type(event.event).model_validate_json(found.value) == event.event
