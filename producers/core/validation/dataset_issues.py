"""Checks that the datasets have what a config needs: enough rows, and the columns that its algorithm
learns from."""

from collections.abc import Iterator

from producers.core.datasets.evaluated_rows import num_evaluated_rows
from schemas.algorithms import PAIRED, PREFERENCE, is_offline
from schemas.config import EvalConfig, RunConfig
from schemas.datasets import preference_form
from schemas.errors import Issue
from schemas.events import DatasetRegistered
from schemas.limits import batch_size, groups_per_step
from schemas.models.teacher import GROUND_TRUTH

LABELS = frozenset({"ground_truth", "label"})
MAX_EVAL_ROWS = 5000
DEMONSTRATION = "user_prompt and ground_truth, or messages, or chosen and rejected"
PAIRS = "prompt, chosen and rejected"
BINARY = "prompt, completion and label (true or false)"


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
    has_label = "messages" in columns or bool("user_prompt" in columns and LABELS & columns)
    return has_label or preference_form(columns) == "paired"


def missing_answers(algorithm: str, dataset: DatasetRegistered) -> str | None:
    """The columns that the algorithm learns from and the dataset lacks, None if it has them."""
    form = preference_form(dataset.columns)
    if algorithm in PAIRED:
        return None if form == "paired" else PAIRS
    if algorithm in PREFERENCE:
        return None if form else f"{BINARY}, or {PAIRS}"
    return None if has_demonstrations(dataset) else DEMONSTRATION


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
    algorithm, ref = config.advanced.algorithm, dataset.dataset
    if batch_size(config) > ref.num_rows:
        key = (
            "advanced.batch_size" if is_offline(config.advanced) else "training.rollout_batch_size"
        )
        yield Issue(
            key,
            f"must be at most {ref.num_rows}, the rows of {ref.name}, got {batch_size(config)}",
        )
    elif groups_per_step(config) > ref.num_rows:
        yield Issue(
            "advanced.curriculum.oversampling_factor",
            f"must let a step have at most {ref.num_rows} groups, the rows of {ref.name}, got "
            f"{groups_per_step(config)}; lower it, or training.rollout_batch_size",
        )
    hint = config.advanced.teacher_hint
    if hint is not None and GROUND_TRUTH in hint and LABELS.isdisjoint(dataset.columns):
        yield Issue(
            "advanced.teacher_hint",
            f"names {GROUND_TRUTH}, and {ref.name} has no such column; it has: "
            f"{', '.join(dataset.columns)}",
        )
    if is_offline(config.advanced) and (missing := missing_answers(algorithm, dataset)):
        yield Issue(
            "experiment.dataset",
            f"must have {missing} for {algorithm}; {ref.name} has: {', '.join(dataset.columns)}",
        )


def validation_dataset_issues(config: RunConfig, validation: DatasetRegistered) -> Iterator[Issue]:
    """The things that the config needs and `advanced.validation_dataset` lacks."""
    key, ref = "advanced.validation_dataset", validation.dataset
    is_loss = is_offline(config.advanced) and not config.experiment.rollout
    if is_loss and (missing := missing_answers(config.advanced.algorithm, validation)):
        yield Issue(
            key,
            f"must have {missing} to measure a loss; {ref.name} has: "
            f"{', '.join(validation.columns)}; set experiment.rollout to score it with a grader",
        )
    if ref.num_rows > MAX_EVAL_ROWS:
        yield Issue(
            key, f"must have at most {MAX_EVAL_ROWS} rows; {ref.name} has {ref.num_rows} rows"
        )
