"""An evaluation on this machine: the rows and attempts of its config, and its figures at the end.

A row has the draws that it would have in an evaluation on a server, so a deterministic evaluation gives
the same results in both.
"""

import asyncio
from collections.abc import Callable, Sequence

from consumers.process.tryout import TriedRow, Tryout, figures_of, lost_row, outcome_of
from infra.task_cancellation import TaskGroup
from producers.core.datasets.evaluated_rows import evaluated_rows
from producers.tryout.report import sample_documents
from schemas.config import EvalConfig
from schemas.datasets import DatasetRow
from schemas.errors import TransientError
from schemas.specs import GroupTemplate

Say = Callable[..., None]


async def evaluate(
    tryout: Tryout,
    template: GroupTemplate,
    config: EvalConfig,
    rows: Sequence[DatasetRow],
    *,
    say: Say,
) -> None:
    """Evaluate the rows that the config selects, `evaluation.batch_size` at the same time. Prints each
    sample in the order of the rows, and then the report."""
    chosen = evaluated_rows(config, len(rows))
    say(note=f"evaluating {len(chosen)} of {len(rows)} rows, {template.num_samples} attempts each")
    room = asyncio.Semaphore(config.evaluation.batch_size)

    async def try_one(slot: int, row: int) -> TriedRow:
        async with room:
            try:
                return await tryout.try_row(row, template, slot=slot)
            except TransientError as error:
                return lost_row(row, template, error)

    tried = []
    async with TaskGroup() as group:
        tasks = [group.create_task(try_one(slot, row)) for slot, row in enumerate(chosen)]
        for task in tasks:
            one = await task
            tried.append(one)
            for document in sample_documents(one, rows[one.row]):
                say(sample=document)
    say(report=_report(tried, config))


def _report(tried: Sequence[TriedRow], config: EvalConfig) -> dict[str, object]:
    n, threshold = config.evaluation.n, config.evaluation.pass_threshold
    mean, figures = figures_of(tried, n=n, threshold=threshold)
    return {
        "model": config.experiment.model_path,
        "dataset": config.experiment.dataset,
        "rollout": config.experiment.rollout,
        "attempts": n,
        "pass_threshold": threshold,
        "seed": config.advanced.seed,
        "reward": mean,
        "metrics": figures,
        "rows": [_row(one, threshold) for one in tried],
    }


def _row(tried: TriedRow, threshold: float) -> dict[str, object]:
    outcome = outcome_of(tried)
    counted = outcome.counted_rewards
    errors = (g.failure for g in tried.grades if g.reward is None and g.failure is not None)
    first = next(errors, None)
    return {
        "row": tried.row,
        "attempts": len(outcome.rewards),
        "passed": sum(outcome.passes(threshold)),
        "failed": len(outcome.failed),
        "left_out": len(outcome.left_out),
        "reward": sum(counted) / len(counted) if counted else None,
        "rewards": list(outcome.rewards),
        "error": f"{first.category}: {first.message}" if first else None,
    }
