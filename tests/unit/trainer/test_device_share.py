"""The device thread of the process that serves rests, so that a run that trains keeps its share."""

import time

import pytest

from trainer.device_thread import Device

JOB_S = 0.01
JOBS = 20


async def busy_share(share: float) -> float:
    """The share of the time that the thread worked, when jobs wait for it all the time."""
    device = Device(threads=1, time_share=lambda: share)
    began = time.monotonic()
    for _ in range(JOBS):
        await device.run(time.sleep, JOB_S)
    await device.run(lambda: None)  # it waits for the rest of the last job
    spent = time.monotonic() - began
    device.close()
    return device.busy_s / spent


@pytest.mark.torch
async def test_the_thread_works_for_its_share_of_the_time_at_most() -> None:
    assert await busy_share(0.25) <= 0.26
    assert await busy_share(1.0) > 0.5  # the twin: without a limit it does not rest


@pytest.mark.torch
async def test_a_result_does_not_wait_for_the_rest() -> None:
    device = Device(threads=1, time_share=lambda: 0.01)
    began = time.monotonic()
    await device.run(time.sleep, 0.05)
    assert time.monotonic() - began < 2.5, "the rest takes five seconds"
    device.close()
