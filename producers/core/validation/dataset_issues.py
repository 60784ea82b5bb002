"""Checks that the datasets have what a config needs: enough rows, and the columns that its algorithm
learns from."""

from collections.abc import Iterator

from producers.core.datasets.evaluated_rows import num_evaluated_rows
from schemas.config import EvalConfig, RunConfig
from schemas.errors import Issue
from schemas.events import DatasetRegistered
from schemas.limits import batch_size

LABELS = frozenset({"ground_truth", "label"})
MAX_EVAL_ROWS = 5000
DEMONSTRATION = "user_prompt and ground_truth, or messages"


def dataset_warnings(config: RunConfig | EvalConfig, dataset: DatasetRegistered) -> Iterator[str]:
    """The things about `experiment.dataset` that the user may not expect."""
    if isinstance(config, EvalConfig) and config.evaluation.limit is None:
        name, num_rows = dataset.dataset.name, dataset.dataset.num_rows
        if (chosen := num_evaluated_rows(config, num_rows)) < num_rows:
            yield (
                f"{chosen} of the {num_rows} rows of {name} are evaluated, a tenth; set "
                "evaluation.limit to evaluate more"
            )


def has_demonstrations(dataset: DatasetRegistered) -> bool:
    """Whether each row holds an answer that can be learned."""
    columns = set(dataset.columns)
    return "messages" in columns or bool("user_prompt" in columns and LABELS & columns)


def dataset_issues(config: RunConfig | EvalConfig, dataset: DatasetRegistered) -> Iterator[Issue]:
    """The things that the config needs and `experiment.dataset` lacks."""
    if isinstance(config, EvalConfig):
        num_rows = num_evaluated_rows(config, dataset.dataset.num_rows)
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
