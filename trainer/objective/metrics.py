"""Means over the actions of a step, gathered micro-batch by micro-batch."""

import torch


class Means:
    """Sums and counts by metric key, in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, key: str, values_M: torch.Tensor) -> None:
        """Take each value into the mean of `key`."""
        self._sums[key] = self._sums.get(key, 0.0) + float(values_M.double().sum())
        self._counts[key] = self._counts.get(key, 0) + values_M.numel()

    def add_sum(self, key: str, value: torch.Tensor) -> None:
        """Take a value into the sum of `key`: a loss whose weights hold the division already."""
        self._sums[key] = self._sums.get(key, 0.0) + float(value.detach().double())
        self._counts[key] = 1

    def values(self) -> dict[str, float]:
        return {key: self._sums[key] / max(1, self._counts[key]) for key in sorted(self._sums)}
