"""The port to the bus: what wakes consumers up when there are new events."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from infra.ports.event_log import Recorded
from schemas.ids import ConsumerName


class Bus(Protocol):
    """Wakes consumers. At least once, in no global order; the log stays the truth."""

    def subscribe(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncGenerator[Sequence[tuple[ConsumerName, Recorded]], None]:
        """Batches of (consumer, event) to decide on, for ever; the next batch comes once this one is
        acknowledged. It may deliver again what never was. Close the generator to leave."""
        ...

    async def acknowledge(self, batch: Sequence[tuple[ConsumerName, Recorded]]) -> None:
        """The decisions on this batch are committed."""
        ...

    async def idle(self) -> bool:
        """Whether everything in the log that the subscribed consumers read was acknowledged."""
        ...
