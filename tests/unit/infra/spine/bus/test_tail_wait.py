"""How long a reader waits for the end of the log: never much longer than an event was hidden."""

import asyncio
import time
from typing import Any, cast

import pytest

from infra.spine.bus.tail_wait import LONGEST_NAP_S, SHORTEST_NAP_S, TailWait
from infra.spine.ports.event_log import Cursor
from infra.spine.postgres.notify import Wakeup


class Hidden:
    """A log with an event above every cursor that no tail shows yet; sleeps take no real time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.naps = 100.0, list[float]()
        self.hides = True
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(asyncio, "sleep", self._nap)

    async def has_events_after(self, after: Cursor) -> bool:
        return self.hides

    async def _nap(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds + 0.0005


async def test_naps_are_a_part_of_what_was_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Hidden(monkeypatch)
    wait, began = TailWait(cast("Any", log), Wakeup()), log.now
    while log.now < began + 2:
        hidden_s = log.now - began
        await wait.wait(Cursor(1, 1))
        assert log.naps[-1] <= max(SHORTEST_NAP_S, hidden_s / 4)
    assert log.naps[-1] == LONGEST_NAP_S
    await wait.wait(Cursor(2, 1))
    assert log.naps[-1] == SHORTEST_NAP_S, "something else is hidden now"


async def test_the_tail_waits_for_a_wake_up_if_no_commit_is_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, wakeup = Hidden(monkeypatch), Wakeup()
    wait = TailWait(cast("Any", log), wakeup)
    for _ in range(20):
        await wait.wait(Cursor(1, 1))
    log.hides = False
    waiting = asyncio.ensure_future(wait.wait(Cursor(1, 1)))
    wakeup.set()
    await waiting
    log.hides, num = True, len(log.naps)
    await wait.wait(Cursor(1, 1))
    assert log.naps[num:] == [SHORTEST_NAP_S], "the next one begins anew"
