"""An event as a record of Kafka: its headers."""

from datetime import UTC, datetime
from uuid import uuid4

from infra.settings.kafka import KafkaSettings
from infra.spine.bus.kafka.records import to_record
from infra.spine.ports.event_log import Cursor, Recorded
from schemas.events import RunWarned
from schemas.ids import EventId, run_stream


def _headers(actor: str | None) -> dict[str, bytes]:
    recorded = Recorded(
        id=EventId(uuid4()),
        stream=run_stream("r"),
        version=1,
        cursor=Cursor(1, 1),
        time=datetime(2026, 1, 1, tzinfo=UTC),
        causation=None,
        correlation=uuid4(),
        traceparent=None,
        run="r",
        payload=RunWarned(run="r", step=1, message="m"),
        actor=actor,
    )
    settings = KafkaSettings.load({"HEADRACE_KAFKA": "broker:9092"})
    assert settings is not None
    return dict(to_record(recorded, settings).headers)


def test_the_actor_is_a_header_only_if_there_is_one() -> None:
    assert _headers("ada/t1@192.0.2.1")["ce_actor"] == b"ada/t1@192.0.2.1"
    assert "ce_actor" not in _headers(None)
