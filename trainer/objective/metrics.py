"""The metrics of a step: means over its actions, over its updates and over its samples."""

import math
from collections.abc import Sequence

import torch

from schemas.learner import GradedGroup


class Means:
    """Collects the metrics of a pass over a batch, one micro-batch after the other. It keeps a sum in
    float64 and a count for each metric key."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, key: str, values_M: torch.Tensor) -> None:
        """Include each value in the mean of `key`."""
        self._sums[key] = self._sums.get(key, 0.0) + float(values_M.double().sum())
        self._counts[key] = self._counts.get(key, 0) + values_M.numel()

    def add_sum(self, key: str, value: torch.Tensor) -> None:
        """Add a scalar to the sum of `key`. This is for a loss whose weights already contain the
        division."""
        self._sums[key] = self._sums.get(key, 0.0) + float(value.detach().double())
        self._counts[key] = 1

    def values(self) -> dict[str, float]:
        """Metric key -> its mean, or its sum if it was collected with `add_sum`."""
        return {key: self._sums[key] / max(1, self._counts[key]) for key in sorted(self._sums)}


def mean_over_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates of a step. Only "train/skipped" is taken from the last
    update."""
    means = {key: math.fsum(m[key] for m in updates) / len(updates) for key in updates[0]}
    return means | {"train/skipped": updates[-1]["train/skipped"]}


def rollout_metrics(groups: Sequence[GradedGroup]) -> dict[str, float]:
    """The mean lengths of the samples of a batch, in tokens: of actions, and of all tokens. Also the
    share of samples that were cut at a limit, and the mean of the rewards of turns if there are any.
    Failed samples are left out. Empty when all failed."""
    samples = [s for group in groups for s in group.samples if s.failure is None]
    if not samples:
        return {}
    lengths = [sum(sum(row.loss_mask) for row in s.sequences) for s in samples]
    totals = [sum(len(row.tokens) for row in s.sequences) for s in samples]
    of_turns = [t.reward for s in samples for t in s.turns if t.reward is not None]
    turn_reward = {"rollout/turn_reward": math.fsum(of_turns) / len(of_turns)} if of_turns else {}
    return turn_reward | {
        "rollout/response_lengths": sum(lengths) / len(samples),
        "rollout/total_lengths": sum(totals) / len(samples),
        "rollout/truncated_ratio": sum(s.truncated for s in samples) / len(samples),
    }
