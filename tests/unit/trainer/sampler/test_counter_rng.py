"""Every part of a draw's key counts, and nothing else does."""

from typing import Any

import pytest

from schemas.sampling import DrawKey
from trainer.sampler.counter_rng import CounterRng

KEY = DrawKey(purpose="train", step=1, slot=2, replacement=0, sample=3)


def drawn(key: DrawKey = KEY, **changes: Any) -> list[float]:
    arguments: dict[str, Any] = {"seed": 5, "prompt": "p", "occurrence": 0} | changes
    rng = CounterRng(key, **arguments)
    return [rng.uniform_at(position) for position in range(3)]


@pytest.mark.parametrize("part", ["step", "slot", "replacement", "sample"])
def test_another_place_in_the_run_has_other_draws(part: str) -> None:
    assert drawn(KEY.model_copy(update={part: 7})) != drawn()


@pytest.mark.parametrize("change", [{"seed": 6}, {"prompt": "q"}, {"occurrence": 1}])
def test_another_run_prompt_or_occurrence_has_other_draws(change: dict[str, Any]) -> None:
    assert drawn(**change) != drawn()


def test_the_same_place_has_the_same_draws() -> None:
    assert drawn() == drawn()
