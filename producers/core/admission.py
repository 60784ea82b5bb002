"""What a config asks that its dataset, or the size of an event, cannot give: known before anything
runs, told with the key to change."""

from collections.abc import Iterator

from schemas.config import EvalConfig, RunConfig
from schemas.errors import Issue
from schemas.events import DatasetRegistered
from schemas.limits import batch_size, too_large, too_many_samples

LABELS = frozenset({"ground_truth", "label"})
MAX_EVAL_ROWS = 5000


DEMONSTRATION = "user_prompt and ground_truth, or messages"


def demonstrates(dataset: DatasetRegistered) -> bool:
    """Whether each row holds an answer that can be learned."""
    columns = set(dataset.columns)
    return "messages" in columns or bool("user_prompt" in columns and LABELS & columns)


def training_issues(
    config: RunConfig, dataset: DatasetRegistered, validation: DatasetRegistered | None
) -> tuple[Issue, ...]:
    """Why this run cannot be, or nothing."""
    return tuple(_training(config, dataset, validation))


def _training(
    config: RunConfig, dataset: DatasetRegistered, validation: DatasetRegistered | None
) -> Iterator[Issue]:
    sft, ref = config.advanced.algorithm == "sft", dataset.dataset
    if reason := too_large(config):
        key, _, rest = reason.partition(" ")
        yield Issue(key, rest)
    if batch_size(config) > ref.num_rows:
        key = "advanced.batch_size" if sft else "training.rollout_batch_size"
        yield Issue(
            key,
            f"must be at most {ref.num_rows}, the rows of {ref.name}; it is {batch_size(config)}",
        )
    if sft and not demonstrates(dataset):
        has = ", ".join(dataset.columns)
        yield Issue("experiment.dataset", f"sft needs {DEMONSTRATION}; {ref.name} has: {has}")
    if sft and validation and not config.experiment.rollout and not demonstrates(validation):
        has = f"{validation.dataset.name} has: {', '.join(validation.columns)}"
        yield Issue(
            "advanced.validation_dataset",
            f"its loss needs {DEMONSTRATION}; {has} (or name a rollout, whose grader scores it)",
        )
    yield from _validation(config, validation)


def _validation(config: RunConfig, validation: DatasetRegistered | None) -> Iterator[Issue]:
    advanced = config.advanced
    if validation is None:
        asked = {
            "checkpoints.eval_interval": config.checkpoints.eval_interval is not None,
            "advanced.validation_samples": advanced.validation_samples != 1,
            "advanced.validation_temperature": advanced.validation_temperature != 0,
        }
        for key in (key for key, given in asked.items() if given):
            message = "needs advanced.validation_dataset, the held-out dataset to validate on"
            yield Issue(key, message)
        return
    if validation.dataset.num_rows > MAX_EVAL_ROWS:
        yield Issue(
            "advanced.validation_dataset",
            f"has {validation.dataset.num_rows} rows; at most {MAX_EVAL_ROWS} can be validated on",
        )
    if reason := too_many_samples(advanced.validation_samples, advanced.rewards):
        yield Issue("advanced.validation_samples", reason)


def evaluation_issues(
    config: EvalConfig, dataset: DatasetRegistered, rows: tuple[int, ...]
) -> tuple[Issue, ...]:
    """Why this evaluation cannot be, or nothing."""
    return tuple(_evaluation(config, dataset, rows))


def _evaluation(
    config: EvalConfig, dataset: DatasetRegistered, rows: tuple[int, ...]
) -> Iterator[Issue]:
    if len(rows) > MAX_EVAL_ROWS:
        yield Issue(
            "evaluation.limit",
            f"{len(rows)} rows of {dataset.dataset.name} are too many for one evaluation; "
            f"set it to at most {MAX_EVAL_ROWS}",
        )
    if reason := too_many_samples(config.evaluation.n, config.advanced.rewards):
        yield Issue("evaluation.n", reason)
