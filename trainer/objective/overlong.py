"""The soft overlong penalty (DAPO, arXiv 2503.14476, equation 13).

    0                                  len <= L - buffer
    ((L - buffer) - len) / buffer      L - buffer < len <= L
    -1                                 L < len

It is multiplied by overlong_penalty and added to the reward before the advantages are computed. L is
max_response_length, which limits all completions of a sample together. So len is the number of actions
of the sample. (Before rules 3 it limited one completion, and len was the longest run of actions.) The
recorded reward is still the one that the grader returned, and the group filter uses the recorded one.
"""

from collections.abc import Sequence
from itertools import groupby

from trainer.forward.packing import Example
from trainer.objective.hyperparameters import Hyperparameters


def length_penalty(length: int, *, longest: int, buffer: int) -> float:
    """The penalty for a completion of `length` tokens, between 0 and -1. `longest` is L."""
    over = length - (longest - buffer)
    return -min(1.0, max(0, over) / buffer)


def longest_completion(example: Example) -> int:
    """The number of tokens in the longest run of actions of a training row."""
    runs = groupby(example.sequence.loss_mask)
    return max((sum(1 for _ in run) for mask, run in runs if mask), default=0)


def with_length_penalty(
    rewards: Sequence[float | None], examples: Sequence[Example], hyperparameters: Hyperparameters
) -> list[float | None]:
    """The reward of each sample plus the penalty for its length. A reward of None stays None."""
    if not hyperparameters.overlong_buffer:
        return list(rewards)
    lengths = [0] * len(rewards)
    for example in examples:
        before = lengths[example.sample]
        lengths[example.sample] = (
            before + sum(example.sequence.loss_mask)
            if hyperparameters.limits_samples
            else max(before, longest_completion(example))
        )
    limits = {
        "longest": hyperparameters.max_response_length,
        "buffer": hyperparameters.overlong_buffer,
    }
    return [
        None
        if reward is None
        else reward + hyperparameters.overlong_penalty * length_penalty(length, **limits)
        for reward, length in zip(rewards, lengths, strict=True)
    ]
