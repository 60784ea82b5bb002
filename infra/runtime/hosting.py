"""The consumers that decide in a process, and the effects that it performs."""

from dataclasses import dataclass

from infra.runtime.consumer import AnyConsumer
from schemas.effects import Effect, Lane
from schemas.ids import WorkerId


@dataclass(frozen=True, slots=True)
class Hosting:
    """The part of the work that a process hosts: its consumers, its lanes, and how many effects it may
    hold at once."""

    worker: WorkerId
    consumers: tuple[AnyConsumer, ...]
    lanes: tuple[Lane, ...]
    capacity: int = 1024

    def performs(self, effect: Effect) -> bool:
        """Whether this process has the lane of an effect, and the consumer that performs it."""
        return effect.lane in self.lanes and any(
            type(effect) in consumer.effects for consumer in self.consumers
        )
