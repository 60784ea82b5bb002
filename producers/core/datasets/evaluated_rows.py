"""Which rows of a dataset an evaluation uses."""

import random

from schemas.config import EvalConfig

SAMPLED_SHARE = 0.1
"""The share of the rows that an evaluation without a limit uses."""


def num_evaluated_rows(config: EvalConfig, num_rows: int) -> int:
    """How many of `num_rows` rows an evaluation uses: `limit`, or a tenth of them."""
    limit = config.evaluation.limit
    if limit is not None:
        return min(limit, num_rows)
    return max(1, round(SAMPLED_SHARE * num_rows))


def evaluated_rows(config: EvalConfig, num_rows: int) -> tuple[int, ...]:
    """The first `limit` rows. Without a limit, a tenth of them, drawn from the seed, in row order."""
    count = num_evaluated_rows(config, num_rows)
    if config.evaluation.limit is not None:
        return tuple(range(count))
    drawn = random.Random(config.advanced.seed).sample(range(num_rows), count)  # noqa: S311 - one seed draws the same rows
    return tuple(sorted(drawn))
