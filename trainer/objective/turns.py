"""Advantages of single turns (MT-GRPO, arXiv 2505.11821).

    A_t = A_i + c (r_ik - mean_G r_k) / (std_G r_k + eps)         for the actions t of turn k of sample i

A_i is the algorithm's own advantage, r_ik the reward that the workflow gave to turn k of sample i, and c
is turn_reward_coef. Mean and deviation are those of turn k over the samples of the group that have a
reward for it. A turn without one, or of a sample whose own reward is missing, adds 0. Turns are numbered
in the order of their requests, which need not be that of the rows.

We decided that the reward of a turn is credited to this turn alone, as in the paper. Sums over later
turns, whose baselines are taken turn by turn, are biased: how many of them are subtracted depends on
when the policy stops (verl-project/verl#7244).
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

import torch

from schemas.errors import CorruptData
from schemas.learner import GradedGroup, numbered_turns, turn_numbers
from schemas.sampling import RewardedTurn, SampleRecord
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import finite_or_none

Number = TypeVar("Number", int, float)


def with_turn_rewards(
    advantage_E: torch.Tensor,
    groups: Sequence[GradedGroup],
    hyperparameters: Hyperparameters,
    advantages: Callable[[Sequence[float | None]], list[float]],
) -> torch.Tensor:
    """(E): the advantages, with those of turns if the run uses them."""
    if not hyperparameters.turn_reward_coef:
        return advantage_E
    return advantage_E + hyperparameters.turn_reward_coef * turn_advantages(groups, advantages)


def turn_advantages(
    groups: Sequence[GradedGroup],
    advantages: Callable[[Sequence[float | None]], list[float]],
) -> torch.Tensor:
    """(E): the normalised reward of the turn that each action belongs to. `advantages` normalises the
    rewards of one turn over a group. Raises CorruptData when the turns of a sample are not those of its
    rows."""
    of_actions: list[float] = []
    for group in groups:
        turns = [numbered_turns(sample) for sample in group.samples]
        by_turn = {
            number: advantages(_rewards_of_turn(group, [found.get(number) for found in turns]))
            for number in {*chain(*turns)}
        }
        for index, sample in enumerate(group.samples):
            of_turn = [by_turn[number][index] for number in turn_numbers(sample)]
            of_actions += spread_turns(sample, of_turn, default=0.0)
    return torch.tensor(of_actions, dtype=torch.float64)


def _rewards_of_turn(
    group: GradedGroup, turns: Sequence[RewardedTurn | None]
) -> list[float | None]:
    """The reward of one turn for each sample of the group. A sample without that turn has None."""
    return [
        finite_or_none(turn.reward)
        if turn is not None and finite_or_none(reward) is not None
        else None
        for turn, reward in zip(turns, group.rewards, strict=True)
    ]


def spread_turns(
    sample: SampleRecord, of_turn: Sequence[Number], *, default: Number
) -> list[Number]:
    """The value of its turn for each action of a sample, row by row, and `default` for a sample that
    records no turns. The first token of a row is not an action (`trainer/forward/packing.py`). Raises
    CorruptData when the turns are not those of the rows."""
    found: list[Number] = []
    for number, row in enumerate(sample.sequences):
        values = [
            value
            for turn, value in zip(sample.turns, of_turn, strict=False)
            if turn.row == number
            for _ in range(turn.num_actions)
        ]
        num_chosen = sum(row.loss_mask)
        if sample.turns and len(values) != num_chosen:
            raise CorruptData(
                f"row {number} of sample {sample.index} has {num_chosen} actions, and its turns have "
                f"{len(values)}"
            )
        values = values or [default] * num_chosen
        found += values[row.loss_mask[0] :]
    return found
