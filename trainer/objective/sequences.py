# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""Sums and means over the actions of a sequence, returned at each of its actions.

A sequence is one training row. It is one unbroken context in which the policy acted, and tokens that the
policy did not write are masked out. A sample whose workflow rewrote the history has several rows, and
each has its own likelihood ratio. A row is never split, so these values do not depend on the
micro-batches.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Which of `num_rows` rows each of the M actions belongs to."""

    row_M: torch.Tensor
    num_rows: int

    def total(self, value_M: torch.Tensor) -> torch.Tensor:
        """(`num_rows`): the sum over each row."""
        return value_M.new_zeros(self.num_rows).index_add(0, self.row_M, value_M)

    def sum(self, value_M: torch.Tensor) -> torch.Tensor:
        """(M): the sum over the row that an action belongs to."""
        return self.total(value_M)[self.row_M]

    def mean(self, value_M: torch.Tensor) -> torch.Tensor:
        """(M): the mean over the row that an action belongs to."""
        return self.sum(value_M) / self.sum(torch.ones_like(value_M))
