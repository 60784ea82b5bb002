"""Compares two checkpoints: their held-out rewards, the held-out rows that changed, and their settings.

The held-out results of a checkpoint are those of the validation that its run made at its step.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from infra.readmodel.estimates import estimate_mean
from infra.readmodel.evaluation_results import (
    Change,
    RowResult,
    compare_rows,
    paired_differences,
    results_by_row,
)
from infra.readmodel.registry import Evaluations
from producers.core.datasets.versions import name_of_version
from producers.core.lookup import Checkpoint

PASSES = 1.0
"""The reward from which an attempt at a held-out row passes."""


async def compare_checkpoints(
    first: Checkpoint, second: Checkpoint, *, evaluations: Evaluations
) -> Mapping[str, object]:
    """The comparison of two checkpoints as JSON. A row has the change of the share of its attempts that
    pass, and by how much its reward changed. `reason` says why the rows cannot be compared, if they
    cannot."""
    both = (first, second)
    results = [await _held_out(one, evaluations) for one in both]
    reason = _obstacle(both, results)
    rows = [] if reason else [_with_difference(row) for row in compare_rows(*results)]
    counts = Counter(str(row["change"]) for row in rows)
    means = [estimate_mean([row.counted_rewards for row in result]) for result in results]
    rewards = [mean.mean if mean else None for mean in means]
    return {
        "checkpoints": [
            {
                "ref": one.ref,
                "run": one.run.run,
                "run_name": one.run.run_name,
                "step": one.spec.step,
                "reward": one.saved.reward,
                "held_out_reward": mean.mean if mean else None,
                "held_out_interval": mean.interval if mean else None,
                "adapter_sha256": one.saved.adapter_sha256,
                "created_at": one.at,
            }
            for one, mean in zip(both, means, strict=True)
        ],
        "held_out_difference": _difference(rewards),
        "differences": [] if reason else paired_differences(*results),
        "settings": differing_settings([_settings(one) for one in both]),
        "counts": {change: counts[change] for change in get_args(Change)},
        "rows": rows,
        "reason": reason,
    }


async def _held_out(checkpoint: Checkpoint, evaluations: Evaluations) -> list[RowResult]:
    groups = await evaluations.groups(f"{checkpoint.run.run}v{checkpoint.spec.step}")
    return await asyncio.to_thread(results_by_row, groups, threshold=PASSES)


def _obstacle(both: Sequence[Checkpoint], results: Sequence[Sequence[RowResult]]) -> str | None:
    """Why the held-out rows of two checkpoints cannot be compared; None if they can."""
    for one, result in zip(both, results, strict=True):
        if one.run.validation is None:
            return (
                f"run {one.run.run_name} has no held-out rows; set advanced.validation_dataset in its "
                "config"
            )
        if not one.run.config.experiment.rollout:
            return (
                f"run {one.run.run_name} has no rollout, so nothing grades answers to its held-out "
                "rows; set experiment.rollout in its config, or compare held-out losses with "
                "`headrace train compare`"
            )
        if not result:
            return (
                f"{one.ref} has no held-out results; validation runs every checkpoints.eval_interval "
                "steps, and archived runs keep no results"
            )
    contents = {one.run.validation.content.sha256 for one in both if one.run.validation}
    if len(contents) > 1:
        names = " and ".join(one.run.validation.name for one in both if one.run.validation)
        return (
            f"the runs have different held-out rows ({names}); compare runs with the same dataset"
        )
    return None


def _with_difference(row: Mapping[str, Any]) -> Mapping[str, object]:
    return {**row, "difference": _difference(row["reward"])}


def _difference(values: Sequence[float | None]) -> float | None:
    before, after = values
    return None if before is None or after is None else after - before


def _settings(checkpoint: Checkpoint) -> Mapping[str, str]:
    run = checkpoint.run
    config = run.config.model_dump(mode="json", exclude_none=True)
    name = name_of_version(run.dataset.name, run.dataset.version)
    dataset = {"dataset": f"{name} ({run.dataset.content.sha256[:12]})"}
    return dataset | dict(flat_settings(config))


def differing_settings(
    settings: Sequence[Mapping[str, str]],
) -> list[Mapping[str, object]]:
    """The settings that are not equal in all of these, as {key, values}. None: not set."""
    keys = dict.fromkeys(key for each in settings for key in each)
    values = {key: [each.get(key) for each in settings] for key in keys}
    return [{"key": key, "values": found} for key, found in values.items() if len(set(found)) > 1]


def flat_settings(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A nested config as pairs of `section.key` and text. Keys without a value are left out."""
    pairs: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            pairs += flat_settings(value, f"{prefix}{key}.")
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            pairs.append((f"{prefix}{key}", text))
    return pairs
