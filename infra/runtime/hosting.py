"""What a process hosts: which consumers decide here, and which effects it performs."""

from dataclasses import dataclass

from infra.runtime.consumer import AnyConsumer
from schemas.effects import Effect, Lane
from schemas.ids import WorkerId


@dataclass(frozen=True, slots=True)
class Hosting:
    """What a process hosts: its consumers, its lanes, and how many effects it holds at once."""

    worker: WorkerId
    consumers: tuple[AnyConsumer, ...]
    lanes: tuple[Lane, ...]
    capacity: int = 1024

    def performs(self, effect: Effect) -> bool:
        return effect.lane in self.lanes and any(
            type(effect) in consumer.effects for consumer in self.consumers
        )
