"""A process holds no more effects than it has room for, however it obtains them."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from infra.ports.ports import Ports
from infra.runtime import performer
from infra.runtime.consumer import NOTHING, AnyConsumer, Decision, Meta
from schemas.effects import FetchCommit
from schemas.events import RunWarned
from tests.kit.hosting import WORKER, Bench, Fetched, Script, consumer, effect

ASKED, CAPACITY = 40, 3


class Counting:
    """A consumer that requests many effects at once, and the largest number of them that were in
    progress together."""

    def __init__(self) -> None:
        self.performed: set[str] = set()
        self.now = self.most = 0
        self.go = asyncio.Event()
        self.consumer: AnyConsumer = replace(
            consumer(Script()), handle=self.handle, perform=self.perform
        )

    def handle(self, state: int, message: RunWarned | Fetched, meta: Meta) -> Decision:
        if isinstance(message, Fetched):
            return NOTHING
        return Decision(effects=tuple(effect(message.run, n) for n in range(ASKED)))

    async def perform(self, asked: FetchCommit, ports: Ports) -> Fetched:
        self.now += 1
        self.most = max(self.most, self.now)
        await self.go.wait()
        self.now -= 1
        self.performed.add(asked.workspace)
        return Fetched(asked)


@pytest.mark.parametrize("messages", [1, 5])
async def test_one_decision_is_born_claimed_as_far_as_there_is_room(
    tmp_path: Path, messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.05)
    counting = Counting()
    bench = Bench(tmp_path, [counting.consumer], capacity=CAPACITY)
    runs = [f"r{n}" for n in range(messages)]
    for run in runs:
        await bench.warn(run, 1)
    async with bench.running():
        await bench.until(lambda: len(bench.world.effects) == messages * ASKED)
        await bench.until(lambda: counting.now >= CAPACITY)
        held = [one for one in bench.world.effects.values() if one.worker == WORKER]
        counting.go.set()
        await bench.until(lambda: len(counting.performed) == messages * ASKED)
    assert len(held) == counting.most == CAPACITY
