"""The relay's position never passes what the broker has acknowledged. `tests/crash/test_relay.py` kills
relays between the two, with a real broker."""

import contextlib
from typing import Any, cast

from infra.spine.bus.kafka.publisher import Forgotten, Publisher
from infra.spine.bus.relay import Leadership, Position, PublishedPage, Relay
from infra.spine.memory.event_log import MemoryLog, World
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.notify import Wakeup


class Broker:
    """A publisher that lost a page, or acknowledges each."""

    cluster = "one"

    def __init__(self, *, lost: bool = False) -> None:
        self.ends = {"t/0": 1}
        self._lost = lost

    async def await_acknowledgements(self, sent: object) -> None:
        if self._lost:
            raise Forgotten("the records of t/0")
        self.ends = {"t/0": 2}


class Saved:
    """A leadership that keeps what was saved."""

    def __init__(self) -> None:
        self.positions: list[Position] = []

    async def save_position(self, position: Position) -> None:
        self.positions.append(position)


async def complete_page(broker: Broker) -> list[Position]:
    """Complete a page unless the broker lost it, and return the positions that were saved."""
    relay = Relay("", MemoryLog(World()), Wakeup(), connect=cast("Any", None))
    saved, page = Saved(), PublishedPage(cast("Any", ()), Cursor(7, 3))
    with contextlib.suppress(Forgotten):
        await relay.complete_page(cast("Leadership", saved), cast("Publisher", broker), page)
    return saved.positions


async def test_no_position_is_saved_behind_a_page_that_the_broker_lost() -> None:
    assert await complete_page(Broker(lost=True)) == []


async def test_a_position_has_the_ends_that_the_broker_acknowledged() -> None:
    assert await complete_page(Broker()) == [Position(Cursor(7, 3), "one", {"t/0": 2})]
