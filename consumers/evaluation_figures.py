"""The figures of an evaluation: means over its samples, and pass@k. Pure functions.

pass@k is the probability that at least one of k attempts at a row passes. With n attempts of which c
pass, its unbiased estimate is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language
Models Trained on Code", arXiv:2107.03374). The figure of an evaluation is the mean over its rows.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

Rewards = tuple[float | None, ...]
"""The rewards of the attempts at one row. None: the attempt failed, or its grader did."""


def pass_at_k(n: int, c: int, k: int) -> Fraction:
    """The unbiased estimate of pass@k from `c` passes among `n` attempts. Raises ValueError unless
    0 <= c <= n and 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} has no estimate from {c} passes among {n} attempts")
    return 1 - Fraction(math.comb(n - c, k), math.comb(n, k))


def powers_of_two(n: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `n`."""
    return tuple(1 << power for power in range(n.bit_length()))


def pass_figures(rows: Sequence[Rewards], *, n: int, threshold: float) -> dict[str, float]:
    """pass@k over rows with `n` attempts each, for the powers of two up to `n`. An attempt without a
    reward says nothing, so it is left out, and a row with fewer than k rewards is left out of pass@k."""
    counts = []
    for rewards in rows:
        graded = [reward for reward in rewards if reward is not None]
        counts.append((len(graded), sum(reward >= threshold for reward in graded)))
    found = {}
    for k in powers_of_two(n):
        values = [pass_at_k(graded, passed, k) for graded, passed in counts if graded >= k]
        if values:
            found[f"eval/pass@{k}"] = float(sum(values) / len(values))
    return found


def evaluation_figures(
    rewards: Mapping[int, Rewards], *, n: int, threshold: float
) -> tuple[float | None, dict[str, float]]:
    """The mean reward (None without any), and all figures that follow from the rewards by slot."""
    rows = [rewards[slot] for slot in sorted(rewards)]
    graded = [reward for row in rows for reward in row if reward is not None]
    figures = {
        "eval/count": float(sum(len(row) for row in rows)),
        "eval/failed": float(sum(reward is None for row in rows for reward in row)),
    }
    if not graded:
        return None, figures
    mean = sum(graded) / len(graded)
    passed = sum(reward >= threshold for reward in graded)
    figures |= {"eval/reward": mean, "eval/pass_rate": passed / len(graded)}
    return mean, figures | pass_figures(rows, n=n, threshold=threshold)
