"""A relay that moves its position before the broker has acknowledged: what must never be.

Started as `python -m tests.crash.early_ack_relay`, with the settings of a relay.
"""

import asyncio
import os
from functools import partial

from infra import failpoints
from infra.adapters import open_backend
from infra.settings.settings import Settings
from infra.spine.bus.kafka.publisher import Publisher, open_publisher
from infra.spine.bus.relay import Leadership, Position, PublishedPage, Relay


class EarlyAckRelay(Relay):
    async def complete_page(
        self, leadership: Leadership, publisher: Publisher, page: PublishedPage
    ) -> None:
        await leadership.save_position(
            Position(page.after, publisher.cluster, dict(publisher.ends))
        )
        failpoints.hit("relay.after_ack")
        await publisher.await_acknowledgements(page.sent)


async def main() -> None:
    settings = Settings.load(os.environ)
    failpoints.arm(settings.failpoint or "", settings.home)
    assert settings.kafka is not None
    async with open_backend(settings) as backend:
        connect = partial(open_publisher, settings.kafka)
        wakeup = backend.notifier.subscribe()
        await EarlyAckRelay(backend.database.url, backend.log, wakeup, connect=connect).run()


if __name__ == "__main__":
    asyncio.run(main())
