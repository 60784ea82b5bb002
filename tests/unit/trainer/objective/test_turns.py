"""Advantages of turns, by hand."""

from typing import Any

import pytest
import torch

from schemas.errors import CorruptData
from schemas.learner import GradedGroup
from schemas.sampling import RewardedTurn, SampleRecord, Sequence
from tests.unit.trainer.batches import policy64
from tests.unit.trainer.support import job, loss_mask
from trainer.algorithms.registry import OBJECTIVES, hyperparameters_of
from trainer.grpo import advantages, prepare_batch
from trainer.objective.turns import turn_advantages

DEVIATION = 2**0.5
"""Of two rewards that are 2 apart, so that each is normalised to 1 / DEVIATION."""


def sample(index: int, *turns: tuple[int, int, float | None]) -> SampleRecord:
    """Rows of two tokens of context and then the actions of their turns: (row, actions, reward)."""
    rows = []
    for number in range(max((row for row, _, _ in turns), default=0) + 1):
        num = sum(count for row, count, _ in turns if row == number) or 2
        rows.append(
            Sequence(
                tokens=(1, 2, *range(3, 3 + num)),
                loss_mask=loss_mask(2, num),
                logprobs=(0.0, 0.0, *(-4.0,) * num),
            )
        )
    of_turns = tuple(RewardedTurn(row=r, num_actions=n, reward=v) for r, n, v in turns)
    return SampleRecord(index=index, sequences=tuple(rows), turns=of_turns)


def found(*samples: SampleRecord, rewards: tuple[float | None, ...]) -> list[float]:
    group = GradedGroup(0, samples, rewards)
    return [round(x * DEVIATION, 4) for x in turn_advantages([group], advantages).tolist()]


def test_a_turn_is_compared_with_the_same_turn_of_the_group() -> None:
    """The second turn is in a row of its own, and one sample has it alone, as it has the third."""
    one = sample(0, (0, 2, 3.0), (1, 1, 0.0), (0, 1, 9.0))
    two = sample(1, (0, 1, 1.0), (0, 2, 2.0))
    assert found(one, two, rewards=(1.0, 0.0)) == [1, 1, 0, -1, -1, 1, 1]


def test_a_turn_has_the_number_of_its_request_and_not_that_of_its_row() -> None:
    """The rows of the second sample have the order of their tokens: its second request comes first."""
    one = sample(0, (0, 2, 3.0), (1, 1, 10.0))
    two = sample(1, (0, 1, 20.0), (1, 2, 1.0))
    swapped = tuple(turn.model_copy(update={"number": 1 - n}) for n, turn in enumerate(two.turns))
    two = two.model_copy(update={"turns": swapped})
    assert found(one, two, rewards=(1.0, 0.0)) == [1, 1, -1, 1, -1, -1]


def test_the_reward_of_a_turn_is_not_that_of_turns_before_it() -> None:
    """Only the second turns differ."""
    one, two = (sample(n, (0, 2, 5.0), (0, 1, reward)) for n, reward in ((0, 1.0), (1, -1.0)))
    assert found(one, two, rewards=(1.0, 0.0)) == [0, 0, 1, 0, 0, -1]


def test_a_sample_without_rewards_adds_nothing_and_is_in_no_mean() -> None:
    """The third has no reward from its grader, the fourth none for its turn, the fifth no turns."""
    samples = [
        sample(0, (0, 1, 3.0)),
        sample(1, (0, 1, 1.0)),
        sample(2, (0, 1, 800.0)),
        sample(3, (0, 1, None)),
        sample(4),
    ]
    given = found(*samples, rewards=(1.0, 0.0, float("nan"), 0.5, 0.5))
    assert given == [1, -1, 0, 0, 0, 0]


def test_turns_that_are_not_those_of_the_rows_are_refused() -> None:
    torn = sample(0, (0, 2, 1.0)).model_copy(
        update={"turns": (RewardedTurn(row=0, num_actions=1, reward=1.0),)}
    )
    with pytest.raises(CorruptData, match="row 0 of sample 0 has 2 actions, and its turns have 1"):
        found(torn, rewards=(1.0,))


def test_a_step_adds_the_weighted_rewards_of_turns() -> None:
    samples = (sample(0, (0, 1, 3.0), (0, 1, 0.0)), sample(1, (0, 1, 1.0), (0, 1, 0.0)))
    group = GradedGroup(0, samples, (1.0, 0.0))

    def advantage(**advanced: Any) -> torch.Tensor:
        chosen = hyperparameters_of(job(**advanced).config, micro_batch_tokens=4096)
        objective = OBJECTIVES["grpo"]
        batch = prepare_batch(policy64(), [group], objective=objective, hyperparameters=chosen)
        return batch.values_E["advantage"]

    own = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64) / DEVIATION
    of_turns = torch.tensor([1.0, 0.0, -1.0, 0.0], dtype=torch.float64) / DEVIATION
    torch.testing.assert_close(advantage(), own, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        advantage(turn_reward_coef=0.5), own + 0.5 * of_turns, atol=1e-5, rtol=0
    )
