"""The port to the bus, which wakes consumers up when there are new events."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from infra.spine.ports.event_log import Recorded
from schemas.ids import ConsumerName


class Bus(Protocol):
    """Wakes consumers. It delivers each event at least once, in no global order. The log is the
    truth."""

    def subscribe(
        self, consumers: Mapping[ConsumerName, Sequence[str]]
    ) -> AsyncGenerator[Sequence[tuple[ConsumerName, Recorded]], None]:
        """Yield batches of (consumer, event) to decide on, without end. The next batch comes once this
        one is acknowledged. A batch that was not acknowledged may be delivered again. Close the
        generator to end the subscription."""
        ...

    async def acknowledge(
        self,
        batch: Sequence[tuple[ConsumerName, Recorded]],
        left: Sequence[tuple[ConsumerName, Recorded]] = (),
    ) -> None:
        """Tell the bus that the decisions on this batch are committed, except on `left`. These messages
        only a newer release can decide on. They stay unconsumed, so that its processes get them."""
        ...

    async def is_idle(self) -> bool:
        """Whether everything in the log that the subscribed consumers read is acknowledged. False while
        there is no subscription."""
        ...
