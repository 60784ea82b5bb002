"""The token bucket: bursts, then a steady rate, and a bounded queue."""

import asyncio

from infra.http.token_bucket import TokenBucket


async def test_a_burst_is_free_and_then_tokens_come_one_by_one() -> None:
    bucket = TokenBucket(per_s=100, burst=5)
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(5):
        assert await bucket.take()
    assert loop.time() - began < 0.05, "the burst"
    await asyncio.gather(*(bucket.take() for _ in range(10)))
    assert loop.time() - began >= 0.09


async def test_too_many_do_not_wait() -> None:
    bucket = TokenBucket(per_s=50, burst=2, most_waiting=3)
    taken = await asyncio.gather(*(bucket.take() for _ in range(20)))
    assert taken == [True] * 5 + [False] * 15
