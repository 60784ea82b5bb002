"""Advantages of agents, by hand."""

from typing import Any

import pytest
import torch

from schemas.errors import CorruptData
from schemas.learner import GradedGroup
from schemas.sampling import RewardedTurn, SampleRecord, Sequence
from tests.unit.trainer.batches import policy64
from tests.unit.trainer.support import job, loss_mask
from trainer.algorithms.registry import OBJECTIVES, hyperparameters_of
from trainer.grpo import prepare_batch

Acted = tuple[int, int, str | None]
"""The row of a turn, its number of actions, and its agent."""


def sample(index: int, *turns: Acted, **own: float) -> SampleRecord:
    """Rows of two tokens of context and then the actions of their turns. `own` are agents' rewards."""
    rows = []
    for number in range(max((row for row, _, _ in turns), default=0) + 1):
        num = sum(count for row, count, _ in turns if row == number) or 2
        mask, logprobs = loss_mask(2, num), (0.0, 0.0, *(-4.0,) * num)
        rows.append(Sequence(tokens=(1, 2, *range(3, 3 + num)), loss_mask=mask, logprobs=logprobs))
    of_turns = tuple(RewardedTurn(row=r, num_actions=n, agent=a) for r, n, a in turns)
    return SampleRecord(index=index, sequences=tuple(rows), turns=of_turns, agent_rewards=own)


def found(
    *samples: SampleRecord, rewards: tuple[float | None, ...], **advanced: Any
) -> list[float]:
    """The advantage of each action, by Dr. GRPO unless another algorithm is given: R - mean."""
    given: dict[str, Any] = {"algorithm": "dr_grpo", "agent_advantages": True, **advanced}
    asked = job(**given).config
    batch = prepare_batch(
        policy64(),
        [GradedGroup(0, samples, rewards)],
        objective=OBJECTIVES[asked.advanced.algorithm],
        hyperparameters=hyperparameters_of(asked, micro_batch_tokens=4096),
    )
    return [round(x, 4) + 0.0 for x in batch.values_E["advantage"].tolist()]


def test_an_agent_is_compared_with_itself_in_the_samples_where_it_acted() -> None:
    """The critic acts in the first two samples only, so the third is not in its mean."""
    one = sample(0, (0, 1, "solver"), (1, 1, "critic"))
    two = sample(1, (0, 2, "solver"), (1, 1, "critic"))
    three = sample(2, (0, 1, "solver"))
    given = found(one, two, three, rewards=(1.0, 0.0, 5.0))
    solver, critic = [-1.0, -2.0, 3.0], [0.5, -0.5]
    assert given == [solver[0], critic[0], solver[1], solver[1], critic[1], solver[2]]


def test_the_own_reward_of_an_agent_is_added_to_that_of_the_sample() -> None:
    one = sample(0, (0, 1, "solver"), (0, 1, "critic"), critic=0.4)
    two = sample(1, (0, 1, "solver"), (0, 1, "critic"), critic=-0.2)
    assert found(one, two, rewards=(1.0, 1.0)) == [0.0, 0.3, 0.0, -0.3]
    assert found(one, two, rewards=(1.0, 0.0)) == [0.5, 0.8, -0.5, -0.8]


def test_a_sample_counts_once_however_often_its_agent_acted() -> None:
    one = sample(0, (0, 1, "solver"), (0, 1, "solver"), (1, 1, "solver"))
    two = sample(1, (0, 1, "solver"))
    assert found(one, two, rewards=(1.0, 0.0)) == [0.5, 0.5, 0.5, -0.5]


def test_turns_without_an_agent_are_compared_with_each_other() -> None:
    """The third sample names nobody. The fourth has no action, and its reward counts in the mean."""
    one = sample(0, (0, 1, None), (0, 1, "critic"))
    two = sample(1, (0, 1, None))
    three = sample(2)
    four = SampleRecord(index=3)
    assert found(one, two, three, four, rewards=(1.0, 0.0, 3.0, 4.0)) == [-1, 0, -2, 1, 1]


def test_a_missing_reward_leaves_the_agents_of_its_sample_out() -> None:
    turns: tuple[Acted, ...] = ((0, 1, "solver"), (0, 1, "critic"))
    samples = [sample(n, *turns, critic=float(n)) for n in range(3)]
    given = found(*samples, rewards=(1.0, None, 0.0))
    assert given == [0.5, -0.5, 0.0, 0.0, -0.5, 0.5]


def test_agents_of_two_groups_are_not_compared() -> None:
    asked = job(algorithm="dr_grpo", agent_advantages=True).config
    groups = [
        GradedGroup(n, (sample(0, (0, 1, "a")), sample(1, (0, 1, "a"))), (2.0 * n, 2.0 * n + 1))
        for n in range(2)
    ]
    batch = prepare_batch(
        policy64(),
        groups,
        objective=OBJECTIVES["dr_grpo"],
        hyperparameters=hyperparameters_of(asked, micro_batch_tokens=4096),
    )
    assert batch.values_E["advantage"].tolist() == [-0.5, 0.5, -0.5, 0.5]


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "maxrl", "gpg", "dapo"])
def test_samples_of_one_agent_have_the_advantages_of_samples(algorithm: str) -> None:
    alone = [sample(n, (0, 1, "a"), (1, n + 1, "a")) for n in range(3)]
    nobody = [sample(n, (0, 1, None), (1, n + 1, None)) for n in range(3)]
    rewards = (1.0, 0.25, 0.0)
    expected = found(*nobody, rewards=rewards, algorithm=algorithm, agent_advantages=None)
    for samples in (alone, nobody):
        assert found(*samples, rewards=rewards, algorithm=algorithm) == expected
    assert len(set(expected)) == 3


def test_rewards_of_turns_are_added_to_the_advantages_of_agents() -> None:
    samples = [sample(n, (0, 1, "a"), (0, 1, "b"), b=float(n)) for n in range(2)]
    rewarded = [
        one.model_copy(
            update={
                "turns": (
                    one.turns[0].model_copy(update={"reward": float(2 * n)}),
                    one.turns[1],
                )
            }
        )
        for n, one in enumerate(samples)
    ]
    plain = found(*samples, rewards=(0.5, 0.5))
    assert plain == [0.0, -0.5, 0.0, 0.5]
    both = found(*rewarded, rewards=(0.5, 0.5), turn_reward_coef=1.0)
    assert both == [round(-(0.5**0.5), 4), -0.5, round(0.5**0.5, 4), 0.5]


def test_turns_that_are_not_those_of_the_rows_are_refused() -> None:
    turn = RewardedTurn(row=0, num_actions=1, agent="a")
    torn = sample(0, (0, 2, "a")).model_copy(update={"turns": (turn,)})
    with pytest.raises(CorruptData, match="row 0 of sample 0 has 2 actions, and its turns have 1"):
        found(torn, torn, rewards=(1.0, 0.0))


def test_a_run_that_does_not_compare_agents_ignores_them() -> None:
    one = sample(0, (0, 1, "solver"), (0, 1, "critic"), critic=9.0)
    two = sample(1, (0, 1, "solver"))
    given = found(one, two, rewards=(1.0, 0.0), agent_advantages=None)
    assert given == [0.5, 0.5, -0.5]


def test_advantages_are_float64() -> None:
    asked = job(agent_advantages=True).config
    batch = prepare_batch(
        policy64(),
        [GradedGroup(0, (sample(0, (0, 1, "a")), sample(1, (0, 1, "a"))), (1.0, 0.0))],
        objective=OBJECTIVES["grpo"],
        hyperparameters=hyperparameters_of(asked, micro_batch_tokens=4096),
    )
    assert batch.values_E["advantage"].dtype == torch.float64
