"""Checks the budget of a run: whether it can be counted, and whether it evidently ends within a step."""

from collections.abc import Iterator

from schemas.algorithms import is_offline
from schemas.config import RunConfig
from schemas.costs.prices import Prices
from schemas.errors import InvalidConfig, Issue


def check_budget(config: RunConfig, prices: Prices | None) -> None:
    """Raises InvalidConfig when the budget limits money, and no device has a price."""
    if config.budget.max_cost is None or (prices is not None and prices.has_devices):
        return
    message = (
        "needs the prices of devices; ask the operator to set HEADRACE_PRICES, or use max_hours or "
        "max_tokens"
    )
    raise InvalidConfig(f"budget.max_cost {message}", issues=(Issue("budget.max_cost", message),))


def budget_warnings(config: RunConfig) -> Iterator[str]:
    """Warn of a budget that is evidently below one step."""
    if config.budget.max_tokens is None or is_offline(config.advanced):
        return
    samples = config.training.rollout_batch_size * config.training.n_samples_per_prompt
    if config.budget.max_tokens < samples:
        yield (
            f"budget.max_tokens is {config.budget.max_tokens}, and a step has {samples} samples of at "
            "least one token: the run pauses before step 2"
        )
