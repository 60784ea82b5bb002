"""Requests for different weights take turns: no two are in progress for different ones, each gets its
turn, and a turn admits those who come in time."""

import asyncio
import random

import pytest

from trainer.sampler.vllm import weight_turns
from trainer.sampler.vllm.weight_turns import BASE, WeightTurns


class Watched:
    """Turns, with the weights of requests that are in progress and of those that were admitted."""

    def __init__(self) -> None:
        self.turns = WeightTurns()
        self.now: list[str] = []
        self.order: list[str] = []

    async def use(
        self, weights: str, *, until: asyncio.Event | None = None, yields: int = 0
    ) -> None:
        async with self.turns.take_turn(weights):
            self.order.append(weights)
            self.now.append(weights)
            try:
                assert set(self.now) == {weights}
                for _ in range(yields):
                    await asyncio.sleep(0)
                if until is not None:
                    await until.wait()
            finally:
                self.now.remove(weights)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_requests_for_different_weights_are_never_in_progress_together() -> None:
    """Also when some are cancelled while they wait or sample, after which all others still end."""
    draw, watched = random.Random(3), Watched()
    for _ in range(40):
        tasks = [
            asyncio.create_task(
                watched.use(draw.choice([BASE, "a", "b"]), yields=draw.randrange(6))
            )
            for _ in range(12)
        ]
        for task in draw.sample(tasks, 3):
            for _ in range(draw.randrange(8)):
                await asyncio.sleep(0)
            task.cancel()
        async with asyncio.timeout(5):
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [e for e in ended if e is not None and not isinstance(e, asyncio.CancelledError)]
        assert watched.turns.is_idle


async def test_all_that_wait_for_weights_get_in_at_their_turn() -> None:
    watched, first = Watched(), asyncio.Event()
    tasks = [asyncio.create_task(watched.use(BASE, until=first))]
    await settle()
    for weights in ("a", "b", "a", "b"):
        tasks.append(asyncio.create_task(watched.use(weights)))
    await settle()
    assert watched.order == [BASE]
    first.set()
    await asyncio.gather(*tasks)
    assert watched.order == [BASE, "a", "a", "b", "b"]


@pytest.mark.parametrize(("turn_s", "order"), [(60.0, "aaab"), (0.0, "aaba")])
async def test_a_turn_goes_on_for_a_while_when_others_wait(
    monkeypatch: pytest.MonkeyPatch, turn_s: float, order: str
) -> None:
    """After that time those who come later wait for the next turn of their weights."""
    monkeypatch.setattr(weight_turns, "TURN_S", turn_s)
    watched, held = Watched(), asyncio.Event()
    tasks = [asyncio.create_task(watched.use("a", until=held)) for _ in range(2)]
    await settle()
    tasks.append(asyncio.create_task(watched.use("b")))
    await settle()
    tasks.append(asyncio.create_task(watched.use("a")))
    await settle()
    held.set()
    await asyncio.gather(*tasks)
    assert "".join(watched.order) == order
