"""20,000 mutated webhooks; `make fuzz` sends a million."""

import random
from pathlib import Path

import pytest

from tests.fuzz.__main__ import connect_workspace
from tests.fuzz.webhooks import fuzz, mutate, valid
from tests.kit.application import application

COUNT = 20_000


@pytest.mark.postgres
async def test_no_mutated_webhook_is_answered_5xx_and_none_unsigned_is_accepted(
    database_url: str, tmp_path: Path
) -> None:
    async with application(database_url, tmp_path / "home") as served:
        await connect_workspace(served)
        found = await fuzz(served.app, seed=13, count=COUNT)
    assert found.wrong == []
    assert found.statuses[202] > COUNT // 50, "some mutated requests are still deliveries"
    assert found.authentic > COUNT // 4


def test_mutations_reach_both_sides_of_the_signature() -> None:
    draw = random.Random(1)
    made = [mutate(draw) for _ in range(500)]
    assert 100 < sum(one.is_authentic() for one in made) < 400
    assert valid(draw).is_authentic()
