"""How far the consumer groups of this installation are behind, as Kafka knows it."""

from collections.abc import Mapping

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient

from infra.kafka.bus import group_prefix
from infra.kafka.settings import KafkaSettings


async def lags(
    settings: KafkaSettings, admin: AIOKafkaAdminClient, reader: AIOKafkaConsumer
) -> Mapping[str, int]:
    """The group's consumers (`run+rollout`) -> records behind the offsets it committed. Raises
    KafkaError."""
    own = group_prefix(settings)
    groups = [name for name, _ in await admin.list_consumer_groups() if name.startswith(own)]
    behind = {}
    for name in sorted(groups):
        committed = await admin.list_consumer_group_offsets(name)
        ends = await reader.end_offsets(list(committed)) if committed else {}
        behind[name.removeprefix(own)] = sum(
            max(0, end - committed[place].offset) for place, end in ends.items()
        )
    return behind
