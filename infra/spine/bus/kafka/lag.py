"""How far the consumer groups of this installation are behind, according to Kafka."""

from collections.abc import Mapping, Sequence

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.structs import TopicPartition

from infra.settings.kafka import KafkaSettings
from infra.spine.bus.kafka.bus import group_prefix


async def read_lags(
    settings: KafkaSettings,
    admin: AIOKafkaAdminClient,
    reader: AIOKafkaConsumer,
    places: Sequence[TopicPartition],
) -> Mapping[str, int]:
    """Per group (named by its consumers: `run+rollout`), how many records lie behind its committed
    offsets, in those topics of `places` that it reads. Raises KafkaError."""
    own = group_prefix(settings)
    groups = [name for name, _ in await admin.list_consumer_groups() if name.startswith(own)]
    ends = await reader.end_offsets(places)
    begins = await reader.beginning_offsets(places)
    behind = {}
    for name in sorted(groups):
        committed = await admin.list_consumer_group_offsets(name)
        topics = {place.topic for place in committed}
        reached = {place: known.offset for place, known in committed.items()}
        behind[name.removeprefix(own)] = sum(
            max(0, ends[place] - reached.get(place, begins[place]))
            for place in places
            if place.topic in topics
        )
    return behind
