"""The soft overlong penalty (DAPO, arXiv 2503.14476, equation 13).

    0                                  len <= L - buffer
    ((L - buffer) - len) / buffer      L - buffer < len <= L
    -1                                 L < len

times overlong_penalty, added to the reward before the advantages. L is max_response_length, which
caps one completion, so len is the sample's longest completion: the longest run of actions. The
recorded reward stays what the grader said, and the group filter looks at that one.
"""

from collections.abc import Sequence
from itertools import groupby

from trainer.forward.packing import Example
from trainer.objective.hyperparameters import Hyperparameters


def length_penalty(length: int, *, longest: int, buffer: int) -> float:
    """Between 0 and -1."""
    over = length - (longest - buffer)
    return -min(1.0, max(0, over) / buffer)


def longest_completion(example: Example) -> int:
    """The longest run of actions in a row."""
    runs = groupby(example.sequence.loss_mask)
    return max((sum(1 for _ in run) for mask, run in runs if mask), default=0)


def with_length_penalty(
    rewards: Sequence[float | None], examples: Sequence[Example], hyperparameters: Hyperparameters
) -> list[float | None]:
    """The rewards of the samples with the penalty for their length; None stays None."""
    if not hyperparameters.overlong_buffer:
        return list(rewards)
    lengths = [0] * len(rewards)
    for example in examples:
        lengths[example.sample] = max(lengths[example.sample], longest_completion(example))
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
