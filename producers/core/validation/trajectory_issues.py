"""Checks that a run on recorded groups fits what recorded them: the tokens must mean the same to its
model, and the recorded logprobs are those of one temperature."""

from collections.abc import Iterator

from producers.core.models.vocabularies import Vocabularies
from schemas.algorithms import learns_trajectories
from schemas.config import EvalConfig, RunConfig
from schemas.datasets import DatasetOrigin
from schemas.errors import Issue
from schemas.events import DatasetRegistered
from schemas.sampling import ModelRef

HOW = "`headrace dataset from-run RUN --as trajectory` makes one"


def trajectory_issues(
    config: RunConfig | EvalConfig, dataset: DatasetRegistered
) -> Iterator[Issue]:
    """Issues with `experiment.dataset` where the run learns from recorded groups, or the dataset has
    them."""
    ref, origin = dataset.dataset, dataset.origin
    wants = isinstance(config, RunConfig) and learns_trajectories(config.advanced)
    if not dataset.has_trajectories or origin is None:
        if wants:
            yield Issue(
                "experiment.dataset",
                f"must have recorded groups in offline mode, and {ref.name} has: "
                f"{', '.join(dataset.columns)}; {HOW}",
            )
        return
    if not wants or not isinstance(config, RunConfig):
        yield Issue(
            "experiment.dataset",
            f"has recorded groups of {origin.name}, from which only a run with "
            "advanced.execution_mode = 'offline' can learn; set it (with an algorithm that compares "
            "the rewards of a group), or make the dataset with --as sft or --as preference",
        )
        return
    yield from _fit_issues(config, origin)


def validation_trajectory_issues(validation: DatasetRegistered) -> Iterator[Issue]:
    """An issue where `advanced.validation_dataset` has recorded groups."""
    if validation.has_trajectories:
        yield Issue(
            "advanced.validation_dataset",
            f"has recorded groups, and validation needs rows with prompts; name another dataset than "
            f"{validation.dataset.name}",
        )


def _fit_issues(config: RunConfig, origin: DatasetOrigin) -> Iterator[Issue]:
    temperature, recorded = config.sampling.rollout_temperature, origin.temperature
    if recorded is not None and temperature != recorded:
        yield Issue(
            "sampling.rollout_temperature",
            f"must be {recorded:g}, at which {origin.name} recorded the logprobs, got {temperature:g}",
        )
    named = "n_samples_per_prompt" in config.training.model_fields_set
    samples, size = config.training.n_samples_per_prompt, origin.num_samples
    is_read = named or config.advanced.minibatch_size is not None
    if is_read and size is not None and samples != size:
        yield Issue(
            "training.n_samples_per_prompt",
            f"must be {size}, the samples of a recorded group, got {samples}",
        )
    if size is None and config.advanced.minibatch_size is not None:
        yield Issue(
            "advanced.minibatch_size",
            "needs groups of one size, and the recorded groups have several; leave it out",
        )


def staleness_warnings(
    config: RunConfig | EvalConfig, dataset: DatasetRegistered, model: ModelRef
) -> Iterator[str]:
    """A warning where the groups were sampled by versions that the policy of the run may be far from."""
    origin = dataset.origin
    if origin is None or origin.model is None or not isinstance(config, RunConfig):
        return
    if origin.newest_version == 0 and _is_same_model(origin.model, model):
        return
    bound = config.advanced.correction != "ratio" or config.advanced.off_policy_threshold
    advice = "" if bound else "; advanced.correction = 'truncated' or 'masked' bounds their weight"
    oldest, newest = origin.oldest_version, origin.newest_version
    versions = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
    yield (
        f"the groups were sampled by {versions} of {origin.name}, and not by the model that the run "
        f"begins with{advice}"
    )


def _is_same_model(recorded: ModelRef, own: ModelRef) -> bool:
    return recorded.model_copy(update={"dtype": own.dtype}) == own


async def vocabulary_problem(
    dataset: DatasetRegistered, model: ModelRef, vocabularies: Vocabularies | None
) -> str | None:
    """Why the model does not read the recorded tokens as the model that sampled them does; None if it
    does."""
    origin = dataset.origin
    if not dataset.has_trajectories or origin is None or origin.model is None:
        return None
    if _is_same_model(origin.model, model) or vocabularies is None:
        return None
    recorded, own = await vocabularies.of(origin.model), await vocabularies.of(model)
    if recorded is not None and recorded == own:
        return None
    why = "cannot be compared with" if recorded is None or own is None else "differs from"
    return (
        f"must have the tokenizer of {origin.model.name}, whose tokens {origin.name} recorded; that of "
        f"this model {why} it. Name that model or a checkpoint of it, or make the dataset with "
        "--as sft or --as preference"
    )
