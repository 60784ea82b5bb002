"""DAPO's soft overlong penalty, computed by hand."""

from dataclasses import replace

import pytest
import torch

from schemas.learner import GradedGroup
from schemas.sampling import SampleRecord
from schemas.sampling import Sequence as Row
from tests.unit.trainer.algorithms.test_registry import prepare
from tests.unit.trainer.batches import policy64
from trainer.algorithms import dapo, dr_grpo
from trainer.forward.packing import Example
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.overlong import length_penalty, longest_completion, with_length_penalty


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (9, -0.75), (10, -1.0), (11, -1.0), (99, -1.0)],
)
def test_it_grows_within_the_buffer_and_no_further(length: int, expected: float) -> None:
    assert length_penalty(length, longest=10, buffer=4) == expected


def row(*mask: int) -> Row:
    return Row.model_construct(
        tokens=tuple(range(5, 5 + len(mask))), loss_mask=mask, logprobs=(-1.0,) * len(mask)
    )


def test_the_length_is_that_of_the_longest_completion() -> None:
    assert longest_completion(Example(0, row(0, 1, 1, 0, 1, 1, 1, 0))) == 3
    assert longest_completion(Example(0, row(0, 0))) == 0


def test_rewards_are_shaped_by_sample_and_none_stays_none() -> None:
    examples = [
        Example(0, row(0, 1, 1)),
        Example(1, row(0, 1)),
        Example(1, row(0, 1, 1, 1, 1)),
        Example(2, row(0, 1, 1, 1, 1)),
    ]
    hyperparameters = Hyperparameters(
        max_response_length=4, overlong_buffer=2, overlong_penalty=0.5
    )
    assert with_length_penalty([1.0, 1.0, None], examples, hyperparameters) == [1.0, 0.5, None]
    several = [*examples[:2], Example(1, row(1, 0, 1, 1, 0))]
    assert with_length_penalty([1.0, 1.0, None], several, hyperparameters) == [1.0, 0.5, None]
    old = replace(hyperparameters, limits_samples=False)
    assert with_length_penalty([1.0, 1.0, None], several, old) == [1.0, 1.0, None]
    off = replace(hyperparameters, overlong_buffer=0)
    assert with_length_penalty([1.0, 1.0, None], examples, off) == [1.0, 1.0, None]


def test_it_is_part_of_the_reward_that_is_compared() -> None:
    """Two right answers, one at the length limit: without the penalty there is nothing to learn."""
    samples = tuple(
        SampleRecord.model_construct(index=i, sequences=(row(0, *(1,) * length),))
        for i, length in enumerate((2, 8))
    )
    group = GradedGroup(0, samples, (1.0, 1.0))
    plain = replace(dapo.OBJECTIVE.defaults, max_response_length=8)
    found = prepare(policy64(), (group,), dapo.OBJECTIVE, plain).values_E["advantage"]
    assert not found.any()
    penal = replace(plain, overlong_buffer=4)
    found = prepare(policy64(), (group,), dr_grpo.OBJECTIVE, penal).values_E["advantage"]
    assert torch.equal(found, torch.tensor([0.5] * 2 + [-0.5] * 8, dtype=torch.float64))
