"""The topics of the event catalogue. Every process that connects creates those that are missing."""

from collections.abc import Iterable

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, NoError, TopicAlreadyExistsError, for_code

from infra.settings.kafka import KafkaSettings
from schemas.envelope import EVENT_TYPES

LARGEST_RECORD = 1 << 20
"""Bytes. An event has at most 64 KiB and its headers."""


def all_topics(settings: KafkaSettings) -> tuple[str, ...]:
    """All topics of this installation."""
    names = dict.fromkeys(event.topic for event in EVENT_TYPES.values())
    return tuple(settings.prefix + name for name in names)


def topics_for_types(settings: KafkaSettings, types: Iterable[str]) -> tuple[str, ...]:
    """The topics that hold events of these types."""
    names = dict.fromkeys(EVENT_TYPES[kind].topic for kind in types if kind in EVENT_TYPES)
    return tuple(settings.prefix + name for name in names)


async def create_missing_topics(admin: AIOKafkaAdminClient, settings: KafkaSettings) -> None:
    """Create missing topics; existing ones are not changed. Raises KafkaError.

    The broker stores records uncompressed, whatever compression a foreign producer uses. So nobody
    can put a record there that our client can neither read nor skip.
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
        for name in all_topics(settings)
        if name not in present
    ]
    if not missing:
        return
    answer = await admin.create_topics(missing)
    for name, code, message in answer.topic_errors:
        error = for_code(code)
        if error not in (NoError, TopicAlreadyExistsError):
            raise KafkaError(f"topic {name} cannot be created: {message or error.__name__}")
