"""Preference losses against TRL and Liger: value and gradient, over any micro-batches."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given

from tests.kit.property_examples import examples
from tests.oracles.pairs import PREFERENCE_COMPARISONS, PairCase, gap, ours, pair_cases
from trainer.preferences.registry import PREFERENCE_OBJECTIVES


@pytest.mark.parametrize("name", PREFERENCE_COMPARISONS)
@examples(25)
@given(case=pair_cases())
def test_value_and_gradient_equal_those_of_other_trainers(name: str, case: PairCase) -> None:
    mine, theirs = PREFERENCE_COMPARISONS[name](case)
    assert theirs
    for peer, found in theirs.items():
        assert gap(mine, found) < 1e-9, peer


def test_every_objective_is_compared() -> None:
    assert {name.partition(",")[0] for name in PREFERENCE_COMPARISONS} == set(PREFERENCE_OBJECTIVES)


@examples(10)
@given(case=pair_cases())
def test_micro_batches_change_nothing(case: PairCase) -> None:
    for algorithm in PREFERENCE_OBJECTIVES:
        whole = ours(replace(case, micro_batch_tokens=4096), algorithm=algorithm)
        split = ours(replace(case, micro_batch_tokens=1), algorithm=algorithm)
        assert gap(whole, split) < 1e-12, algorithm


@examples(8)
@given(case=pair_cases())
def test_the_gradient_is_the_slope(case: PairCase) -> None:
    """KTO's baseline is a constant, so its slope is that of the loss at this baseline."""
    step = 1e-6
    for algorithm in PREFERENCE_OBJECTIVES:
        _, gradient = ours(case, algorithm=algorithm)
        for place in ((0, 0), (1, case.lengths[1] - 1)):
            nudge = torch.zeros_like(case.now)
            nudge[place] = step
            above, _ = ours(replace(case, now=case.now + nudge), algorithm=algorithm)
            below, _ = ours(replace(case, now=case.now - nudge), algorithm=algorithm)
            assert abs((above - below) / (2 * step) - float(gradient[place])) < 1e-6, algorithm
