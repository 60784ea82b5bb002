"""While a run trains on vLLM servers, fewer answers of deployments are sampled together."""

import asyncio

from infra.model_api.serving.turns import AnswerTurns


async def most_at_once(limit: int, calls: int = 6) -> int:
    """The largest number of calls that had a turn together."""
    turns, now, most = AnswerTurns(lambda: limit), 0, 0

    async def call() -> None:
        nonlocal now, most
        async with turns.turn():
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1

    async with asyncio.timeout(60):
        await asyncio.gather(*(call() for _ in range(calls)))
    return most


async def test_no_more_calls_have_a_turn_than_there_may_be() -> None:
    assert await most_at_once(2) == 2
    assert await most_at_once(0) == 1, "one may always go on"
    assert await most_at_once(100) == 6  # the twin


async def test_calls_that_wait_go_on_when_the_run_has_ended() -> None:
    limit = 1
    turns = AnswerTurns(lambda: limit)
    both = asyncio.Barrier(2)

    async def call() -> None:
        async with turns.turn():
            await both.wait()

    waiting = asyncio.gather(call(), call())
    await asyncio.sleep(0)
    limit = 2
    async with asyncio.timeout(60):
        await waiting
