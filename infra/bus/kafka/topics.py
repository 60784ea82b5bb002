"""The topics of the catalogue: made when something first connects, the same by whoever makes them."""

from collections.abc import Iterable

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, NoError, TopicAlreadyExistsError, for_code

from infra.settings.kafka import KafkaSettings
from schemas.events import ALL_EVENTS, EVENT_TYPES

LARGEST_RECORD = 1 << 20
"""Bytes; an event has 64 KiB and its headers at most."""


def topics(settings: KafkaSettings) -> tuple[str, ...]:
    """All topics of this installation."""
    names = dict.fromkeys(event.topic for event in ALL_EVENTS)
    return tuple(settings.prefix + name for name in names)


def topics_of(settings: KafkaSettings, types: Iterable[str]) -> tuple[str, ...]:
    """The topics in which events of these types are found."""
    names = dict.fromkeys(EVENT_TYPES[kind].topic for kind in types if kind in EVENT_TYPES)
    return tuple(settings.prefix + name for name in names)


async def ensure(admin: AIOKafkaAdminClient, settings: KafkaSettings) -> None:
    """Make the topics that are missing; those that are there stay as they are. Raises KafkaError.

    Whatever compression a foreign producer uses, the broker takes it apart (`uncompressed`), so that
    nobody can put a record there that our client cannot read and get past.
    """
    configs = {
        "retention.ms": str(settings.retention_hours * 3_600_000),
        "cleanup.policy": "delete",
        "compression.type": "uncompressed",
        "max.message.bytes": str(LARGEST_RECORD),
    }
    present = set(await admin.list_topics())
    missing = [
        NewTopic(name, settings.partitions, settings.replication, {}, configs)
        if settings.replication < 0
        else NewTopic(name, settings.partitions, settings.replication, topic_configs=configs)
        for name in topics(settings)
        if name not in present
    ]
    if not missing:
        return
    answer = await admin.create_topics(missing)
    for name, code, message in answer.topic_errors:
        error = for_code(code)
        if error not in (NoError, TopicAlreadyExistsError):
            raise KafkaError(f"topic {name} cannot be made: {message or error.__name__}")
