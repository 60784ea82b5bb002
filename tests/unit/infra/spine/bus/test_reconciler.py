"""What the reconciler leaves for newer processes stays above its watermark."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from uuid import uuid4

import pytest

from infra.spine.bus import reconciler
from infra.spine.bus.reconciler import Reconciler
from infra.spine.memory.event_log import MemoryLog, World
from infra.spine.ports.event_log import Cursor, Recorded
from infra.spine.postgres.notify import Wakeup
from schemas.events import RunWarned
from schemas.ids import ConsumerName

ME = ConsumerName("me")


@pytest.mark.parametrize("is_left", [True, False])
async def test_the_watermark_stays_below_what_is_left(
    is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "ADVANCE_S", 0.0)
    log = MemoryLog(World())
    event = RunWarned(run="r", step=1, message="look")
    recorded: Sequence[Recorded] = await log.append([event], cause=uuid4())
    bus = Reconciler(log, Wakeup(), wait_s=0.0)
    async with asyncio.timeout(10), aclosing(bus.subscribe({ME: [RunWarned.type]})) as heard:
        batch = await anext(heard)
        await bus.acknowledge(batch, batch if is_left else ())
    mark: Cursor = await log.watermark(ME)
    assert (mark < recorded[0].cursor) == is_left
