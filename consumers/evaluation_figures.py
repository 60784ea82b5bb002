"""The figures of an evaluation: means over its attempts, and pass@k, each with its standard error and
its 95 % interval (`infra/readmodel/estimates.py`). Pure functions.

An attempt that failed because of what the policy wrote (`schemas.errors.POLICY_FAILURES`) counts with
the reward 0 and does not pass. An attempt that the platform, the grader or a judge failed says nothing
about the policy and is left out. Both are counted: `eval/failed` and `eval/left_out`.

pass@k is the probability that at least one of k attempts at a row passes. With n attempts of which c
pass, its unbiased estimate is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language
Models Trained on Code", arXiv:2107.03374). The figure of an evaluation is the mean over its rows: the
rows of which no attempt is left out, the same ones for every k.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from infra.readmodel.estimates import estimate_mean
from schemas.errors import FAILED_REWARD, POLICY_FAILURES

Rewards = tuple[float | None, ...]
"""The rewards of the attempts at one row. None: the attempt failed, or its grader did."""


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """The attempts at one row: their rewards, and which of them the policy failed. Those count as failed
    also where the run gives them a reward to train on (`advanced.failed_reward`)."""

    rewards: Rewards
    failed: frozenset[int] = frozenset()

    @property
    def left_out(self) -> tuple[int, ...]:
        """The attempts that count nowhere, by number."""
        missing = (i for i, reward in enumerate(self.rewards) if reward is None)
        return tuple(number for number in missing if number not in self.failed)

    @property
    def counted_rewards(self) -> tuple[float, ...]:
        """The rewards that count."""
        return (
            *self._graded_rewards,
            *(FAILED_REWARD for _ in self.failed),
        )

    @property
    def _graded_rewards(self) -> tuple[float, ...]:
        """The rewards of the attempts that did not fail."""
        numbered = enumerate(self.rewards)
        return tuple(r for n, r in numbered if r is not None and n not in self.failed)

    def passes(self, threshold: float) -> tuple[bool, ...]:
        """Whether each attempt that counts passes."""
        graded = (reward >= threshold for reward in self._graded_rewards)
        return (*graded, *(False for _ in self.failed))


def failed_by_policy(failures: Iterable[str | None]) -> frozenset[int]:
    """The numbers of the attempts that failed because of what the policy wrote. `failures` are the
    categories of all attempts in order, None for those that were generated."""
    return frozenset(number for number, why in enumerate(failures) if why in POLICY_FAILURES)


def pass_at_k(n: int, c: int, k: int) -> Fraction:
    """The unbiased estimate of pass@k from `c` passes among `n` attempts. Raises ValueError unless
    0 <= c <= n and 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} has no estimate from {c} passes among {n} attempts")
    return 1 - Fraction(math.comb(n - c, k), math.comb(n, k))


def reported_k(n: int) -> tuple[int, ...]:
    """The k of the figures pass@k with `n` attempts at a row: 1, 2, 4, ... and `n` itself."""
    return tuple(sorted({*(1 << power for power in range(n.bit_length())), n}))


def pass_figures(rows: Sequence[RowOutcome], *, n: int, threshold: float) -> dict[str, float]:
    """pass@k over the rows whose `n` attempts all count, and how many rows these are."""
    passed = [
        sum(row.passes(threshold)) for row in rows if len(row.rewards) == n and not row.left_out
    ]
    figures = {"eval/rows": float(len(passed))}
    for k in reported_k(n) if passed else ():
        values = [(float(pass_at_k(n, count, k)),) for count in passed]
        if found := estimate_mean(values, is_proportion=True):
            figures |= found.figures(f"eval/pass@{k}")
    return figures


def evaluation_figures(
    rows: Mapping[int, RowOutcome], *, n: int, threshold: float
) -> tuple[float | None, dict[str, float]]:
    """The mean reward (None if no attempt counts), and all figures that follow from the attempts by
    slot."""
    in_order = [rows[slot] for slot in sorted(rows)]
    figures = {
        "eval/count": float(sum(len(row.rewards) for row in in_order)),
        "eval/failed": float(sum(len(row.failed) for row in in_order)),
        "eval/left_out": float(sum(len(row.left_out) for row in in_order)),
    }
    reward = estimate_mean([row.counted_rewards for row in in_order])
    passed = [[float(passes) for passes in row.passes(threshold)] for row in in_order]
    pass_rate = estimate_mean(passed, is_proportion=True)
    if reward is None or pass_rate is None:
        return None, figures
    figures |= reward.figures("eval/reward") | pass_rate.figures("eval/pass_rate")
    return reward.mean, figures | pass_figures(in_order, n=n, threshold=threshold)
