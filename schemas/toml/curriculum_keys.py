"""Issues with `[advanced.curriculum]`, as far as the config alone shows them."""

from collections.abc import Iterator

from schemas.algorithms import UNGROUPED, is_offline, replacements
from schemas.config import RunConfig
from schemas.errors import Issue
from schemas.limits import MOST_MOVED_ROWS, groups_per_step

TABLE = "advanced.curriculum"
NEEDED = {
    "hard_fraction": "min_pass_rate",
    "easy_fraction": "max_pass_rate",
}
"""Key -> the key without which its pool is always empty."""


def curriculum_issues(config: RunConfig) -> Iterator[Issue]:
    """Keys of the table that contradict each other, or that the run would not read."""
    advanced = config.advanced
    table = advanced.curriculum
    if table is None or is_offline(advanced):
        return
    for key, needed in NEEDED.items():
        if getattr(table, key) is not None and getattr(table, needed) is None:
            yield Issue(f"{TABLE}.{key}", f"needs {TABLE}.{needed}; set it, or leave this key out")
    if not table.has_pools:
        if table.pass_reward is not None:
            yield Issue(
                f"{TABLE}.pass_reward",
                "needs min_pass_rate or max_pass_rate; set one, or leave this key out",
            )
        if table.oversampling_factor is None:
            yield Issue(
                TABLE, "sets neither min_pass_rate, max_pass_rate nor oversampling_factor; set one"
            )
    low, high = table.min_pass_rate, table.max_pass_rate
    if low is not None and high is not None and low >= high:
        yield Issue(
            f"{TABLE}.min_pass_rate", f"must be below max_pass_rate ({high:g}), got {low:g}"
        )
    shares = (table.easy_fraction or 0.0) + (table.hard_fraction or 0.0)
    if shares >= 1:
        yield Issue(
            f"{TABLE}.easy_fraction",
            f"must be below 1 together with hard_fraction, got {shares:g}: the other groups are for "
            "rows in no pool",
        )
    if table.oversampling_factor is not None and advanced.algorithm in UNGROUPED:
        yield Issue(
            f"{TABLE}.oversampling_factor",
            f"has no meaning for {advanced.algorithm}, which learns from groups with equal rewards "
            "too; leave it out",
        )
    most_moved = groups_per_step(config) * (1 + replacements(advanced))
    if table.has_pools and most_moved > MOST_MOVED_ROWS:
        yield Issue(
            TABLE,
            f"may move {most_moved} rows in a step, and one event holds {MOST_MOVED_ROWS}; lower "
            "training.rollout_batch_size or advanced.max_replacements",
        )
