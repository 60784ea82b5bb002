"""Estimates what a run will cost from the ledger of runs like it: of the same model, with steps of the
same size."""

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from infra.costs.ledger import PastRun
from schemas.algorithms import is_offline
from schemas.config import RunConfig
from schemas.costs.prices import Prices
from schemas.costs.work import add_spent

MOST_RUNS = 5


def past_estimate(
    config: RunConfig, past: Sequence[PastRun], *, steps: int, prices: Prices
) -> Mapping[str, object] | None:
    """Return what the steps of the newest like runs cost on average, times the steps of this run: their
    names, device-seconds of a step and device-hours in all by kind of device, tokens, and US dollars
    (None without a price). None when there is no like run."""
    like = [run for run in past if _sizes_of(run.config) == _sizes(config)][:MOST_RUNS]
    if not like:
        return None
    taken = sum(run.steps for run in like)
    spent = add_spent(run.line.spent for run in like)
    step = {device: seconds / taken for device, seconds in spent.items()}
    total = {device: seconds * steps for device, seconds in step.items()}
    cost = prices.devices_usd(total)
    calls = sum(run.line.calls_usd + prices.calls_usd(run.line.calls_tokens) for run in like)
    calls *= steps / taken
    return {
        "runs": [run.name for run in like],
        "step_s": {device: round(seconds, 3) for device, seconds in step.items()},
        "device_hours": {device: seconds / 3600 for device, seconds in total.items()},
        "tokens": round(sum(run.line.sampled for run in like) / taken * steps),
        "cost": None if cost is None and not calls else (cost or 0.0) + calls,
    }


def _sizes_of(config: str) -> tuple[object, ...] | None:
    try:
        return _sizes(RunConfig.model_validate_json(config))
    except ValidationError:  # of another release
        return None


def _sizes(config: RunConfig) -> tuple[object, ...]:
    """The sizes that determine the cost of a step besides the model."""
    training, advanced = config.training, config.advanced
    if is_offline(advanced):
        sizes = (advanced.batch_size, advanced.max_sequence_length)
    else:
        sizes = (training.rollout_batch_size, training.n_samples_per_prompt)
    same = (advanced.algorithm, advanced.tuning, advanced.precision, advanced.lora_rank)
    return (*sizes, *same, training.max_response_length, config.experiment.rollout)
