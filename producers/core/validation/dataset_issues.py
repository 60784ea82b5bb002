"""Checks that the datasets have what a config needs: enough rows, and the columns that its algorithm
learns from."""

from collections.abc import Iterator

from schemas.config import EvalConfig, RunConfig
from schemas.errors import Issue
from schemas.events import DatasetRegistered
from schemas.limits import batch_size
from schemas.specs import DatasetRef

LABELS = frozenset({"ground_truth", "label"})
MAX_EVAL_ROWS = 5000
SAMPLED_SHARE = 0.1
"""The share of the rows that an evaluation without a limit uses."""

DEMONSTRATION = "user_prompt and ground_truth, or messages"


def num_evaluated_rows(config: EvalConfig, dataset: DatasetRef) -> int:
    """How many rows an evaluation uses: `limit`, or a tenth of the dataset."""
    limit = config.evaluation.limit
    if limit is not None:
        return min(limit, dataset.num_rows)
    return max(1, round(SAMPLED_SHARE * dataset.num_rows))


def has_demonstrations(dataset: DatasetRegistered) -> bool:
    """Whether each row holds an answer that can be learned."""
    columns = set(dataset.columns)
    return "messages" in columns or bool("user_prompt" in columns and LABELS & columns)


def dataset_issues(config: RunConfig | EvalConfig, dataset: DatasetRegistered) -> Iterator[Issue]:
    """The things that the config needs and `experiment.dataset` lacks."""
    if isinstance(config, EvalConfig):
        num_rows = num_evaluated_rows(config, dataset.dataset)
        if num_rows > MAX_EVAL_ROWS:
            yield Issue(
                "evaluation.limit",
                f"must be at most {MAX_EVAL_ROWS}, got {num_rows} rows of {dataset.dataset.name}",
            )
        return
    is_sft, ref = config.advanced.algorithm == "sft", dataset.dataset
    if batch_size(config) > ref.num_rows:
        key = "advanced.batch_size" if is_sft else "training.rollout_batch_size"
        yield Issue(
            key,
            f"must be at most {ref.num_rows}, the rows of {ref.name}, got {batch_size(config)}",
        )
    if is_sft and not has_demonstrations(dataset):
        yield Issue(
            "experiment.dataset",
            f"must have {DEMONSTRATION} for sft; {ref.name} has: {', '.join(dataset.columns)}",
        )


def validation_dataset_issues(config: RunConfig, validation: DatasetRegistered) -> Iterator[Issue]:
    """The things that the config needs and `advanced.validation_dataset` lacks."""
    key, ref = "advanced.validation_dataset", validation.dataset
    is_loss = config.advanced.algorithm == "sft" and not config.experiment.rollout
    if is_loss and not has_demonstrations(validation):
        yield Issue(
            key,
            f"must have {DEMONSTRATION} to measure a loss; {ref.name} has: "
            f"{', '.join(validation.columns)}; set experiment.rollout to score it with a grader",
        )
    if ref.num_rows > MAX_EVAL_ROWS:
        yield Issue(
            key, f"must have at most {MAX_EVAL_ROWS} rows; {ref.name} has {ref.num_rows} rows"
        )
