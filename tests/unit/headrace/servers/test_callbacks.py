"""The controller that servers of generation 1 and 2 report to."""

import asyncio
from typing import Any

import pytest

from headrace.servers.attempts import AttemptFailed
from headrace.servers.callbacks import ReportingRollouts
from headrace.servers.loopback import Loopback
from headrace.servers.program import free_port
from tests.unit.headrace.servers.scripted import ATTEMPT


async def test_attempts_that_begin_together_share_one_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []
    plain = asyncio.start_server

    async def start_server(*args: Any, **options: Any) -> asyncio.Server:
        await asyncio.sleep(0)
        started.append(await plain(*args, **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "start_server", start_server)
    rollouts = ReportingRollouts(Loopback(free_port()), is_single=False)
    made = await asyncio.gather(*(rollouts.make(ATTEMPT) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(error, AttemptFailed) for error in made)
    assert len(started) == 1
    started[0].close()
