"""Strangers load a real control process for a moment. `bench/strangers.py` does the same for longer and
prints figures."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path

import pytest

from tests.kit.strangers import (
    MIB,
    ControlProcess,
    control_process,
    half_open,
    observing,
    send_bad_keys,
    send_bodies,
)

pytestmark = pytest.mark.postgres

SECONDS = 1.0
ENOUGH = 50
"""How many requests must be refused."""

MOST_CLIENT_S = 5.0


async def _load(control: ControlProcess) -> Counter[int]:
    loads: list[Coroutine[None, None, Counter[int]]] = [
        send_bodies(control, 20, 8 * MIB),
        send_bad_keys(control, seconds=SECONDS, at_once=8, well_formed=False),
        send_bad_keys(control, seconds=SECONDS, at_once=8, well_formed=True),
    ]
    async with half_open(control, 200):
        return sum(await asyncio.gather(*loads), Counter())


async def test_strangers_do_not_keep_a_client_waiting(database_url: str, tmp_path: Path) -> None:
    with control_process(database_url, tmp_path) as control:
        before, lines = control.memory, control.num_log_lines
        answers = Counter[int]()
        async with observing(control) as seen:
            while answers[401] <= ENOUGH:  # a slow machine refuses few of them in a second
                answers += await _load(control)
        assert set(answers) <= {0, 401}
        assert set(seen.statuses) == {200}
        assert max(seen.client_s) < MOST_CLIENT_S
        assert seen.most_memory - before < 50 * MIB
        assert control.num_log_lines - lines < 20
