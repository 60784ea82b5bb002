"""Returns of samples whose rows have another order than their requests."""

import pytest
import torch

from schemas.learner import GradedGroup
from schemas.sampling import RewardedTurn, SampleRecord, Sequence
from tests.unit.trainer.support import loss_mask
from trainer.algorithms import ppo, reinforce_plus_plus
from trainer.objective.batch import examples_of, request_of_each_action, sample_of_each_action
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import BatchBeforeUpdate, Objective

FIRST, SECOND, OTHER = 2, 3, 4
"""The actions of two rows of a sample, and of another sample."""
VALUES = {FIRST: [0.1, 0.2], SECOND: [0.5, 0.4, 0.3], OTHER: [0.0, 0.1, 0.2, 0.9]}
PENALTIES = {FIRST: [0.01, 0.02], SECOND: [0.03, 0.05, 0.07], OTHER: [0.0, 0.0, 0.01, 0.02]}


def sample(index: int, *rows: int, numbers: tuple[int | None, ...] = ()) -> SampleRecord:
    """Rows of two tokens of context and this many actions, of a turn each."""
    return SampleRecord(
        index=index,
        sequences=tuple(
            Sequence(
                tokens=tuple(range(2 + n)), loss_mask=loss_mask(2, n), logprobs=(0.0,) * (2 + n)
            )
            for n in rows
        ),
        turns=tuple(
            RewardedTurn(row=row, num_actions=rows[row], number=number)
            for row, number in enumerate(numbers)
        ),
    )


def estimated(objective: Objective, *samples: SampleRecord) -> dict[int, list[float]]:
    """The advantages (and returns) of the actions of each row, by its number of actions."""
    group = GradedGroup(0, samples, (1.0,) * len(samples))
    examples = examples_of([group])
    sizes = [row.num_actions for row in examples]
    before = BatchBeforeUpdate(
        group_S=[0] * len(samples),
        reward_S=group.rewards,
        sample_E=sample_of_each_action(examples),
        penalty_E=torch.tensor([x for n in sizes for x in PENALTIES[n]], dtype=torch.float64),
        value_E=torch.tensor([x for n in sizes for x in VALUES[n]], dtype=torch.float64),
        request_E=request_of_each_action([group]),
    )
    found = objective.estimate(before, Hyperparameters(gamma=0.9, gae_lambda=0.8))
    of_E = [found.advantage_E, *([] if found.return_E is None else [found.return_E])]
    parts = zip(*(value_E.split(sizes) for value_E in of_E), strict=True)
    return {n: torch.cat(part).tolist() for n, part in zip(sizes, parts, strict=True)}


@pytest.mark.parametrize("objective", [ppo.OBJECTIVE, reinforce_plus_plus.OBJECTIVE])
def test_the_reward_is_at_the_last_request_whatever_the_order_of_rows(objective: Objective) -> None:
    """Twin: without the numbers of the requests, the row in the last place earns it."""
    in_order = estimated(objective, sample(0, OTHER), sample(1, FIRST, SECOND))
    moved = sample(1, SECOND, FIRST, numbers=(1, 0))
    found = estimated(objective, sample(0, OTHER), moved)
    assert found == {n: pytest.approx(values, abs=1e-12) for n, values in in_order.items()}
    unnumbered = sample(1, SECOND, FIRST, numbers=(None, None))
    assert estimated(objective, sample(0, OTHER), unnumbered) != found


def test_a_batch_whose_rows_are_in_order_is_computed_as_before() -> None:
    """No running run gets another bit."""
    groups = [
        GradedGroup(0, (sample(0, FIRST, SECOND, numbers=(None, None)), sample(1)), (1.0, 1.0))
    ]
    assert request_of_each_action(groups) is None
