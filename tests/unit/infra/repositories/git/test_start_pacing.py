"""A burst begins at once, and what follows is spread."""

import asyncio

from infra.repositories.git.start_pacing import StartPacing


async def test_a_burst_begins_at_once_and_the_rest_at_the_given_rate() -> None:
    pace, loop = StartPacing(per_s=100, burst=5), asyncio.get_running_loop()
    began = loop.time()
    times: list[float] = []

    async def work() -> None:
        await pace.wait()
        times.append(loop.time() - began)

    await asyncio.gather(*(work() for _ in range(15)))
    assert times == sorted(times)
    assert times[4] < 0.009, "the burst does not wait"
    assert times[14] >= 0.09, "ten more take ten intervals"


async def test_after_a_rest_a_burst_is_free_again() -> None:
    pace, loop = StartPacing(per_s=1000, burst=3), asyncio.get_running_loop()
    for _ in range(10):
        await pace.wait()
    await asyncio.sleep(0.05)
    began = loop.time()
    for _ in range(3):
        await pace.wait()
    assert loop.time() - began < 0.001 * 3
