"""Finds keys in the file that the run would not read. They are refused by name and never ignored.

`schemas/algorithms.py` holds the keys that only some algorithms read. This module holds what
follows from the shape of the run: one that learns from the answers of a dataset samples nothing in
training, and without a rollout it runs no user code.
"""

from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from schemas.algorithms import OFFLINE, SCORED, is_offline, learns_trajectories
from schemas.config import Advanced, RunConfig
from schemas.errors import Issue

OFFLINE_ONLY = {
    "batch_size": "the groups of a step are training.rollout_batch_size",
    "max_sequence_length": "set training.max_prompt_length and training.max_response_length",
}
SAMPLED_IN_TRAINING = {
    "training.n_samples_per_prompt": "nothing is sampled in training",
    "training.rollout_batch_size": "the rows of a step are advanced.batch_size",
    "sampling.rollout_temperature": "validation has advanced.validation_temperature",
    "sampling.rollout_top_p": "nothing is sampled in training",
}
SAMPLED_IN_VALIDATION = (
    "training.max_prompt_length",
    "training.max_response_length",
    "training.max_answer_length",
    "training.agent_workflow_timeout_s",
    "training.grader_timeout_s",
)
CODE = ("experiment.entrypoint", "experiment.branch", "experiment.commit_sha")
ADAPTER = ("lora_rank", "lora_alpha", "lora_scaling", "lora_variant", "lora_targets")


def unread_issues(config: RunConfig) -> Iterator[Issue]:
    """One issue for each key in the file that this run would not read."""
    named = frozenset(_keys_in_file(config))
    advanced = config.advanced
    if is_offline(advanced):
        yield from _unread_offline(config, named)
    else:
        for key, instead in OFFLINE_ONLY.items():
            if f"advanced.{key}" in named:
                yield Issue(
                    f"advanced.{key}",
                    f"is not read by {advanced.algorithm}, only by {', '.join(OFFLINE)}; {instead}",
                )
        if learns_trajectories(advanced):
            yield from _unread_of_trajectories(config, named)
    for key in ADAPTER:
        if advanced.tuning == "full" and f"advanced.{key}" in named:
            message = "is not read with tuning = 'full', which trains all weights; leave it out"
            yield Issue(f"advanced.{key}", message)
    yield from _unread_by_optimizer(advanced, named)
    if advanced.lr_schedule == "constant" and "advanced.lr_min_ratio" in named:
        message = "is not read with lr_schedule = 'constant'; use 'linear' or 'cosine'"
        yield Issue("advanced.lr_min_ratio", message)


def _unread_by_optimizer(advanced: Advanced, named: frozenset[str]) -> Iterator[Issue]:
    if advanced.optimizer != "muon":
        if "advanced.muon_momentum" in named:
            message = "is not read by adamw; set advanced.optimizer = 'muon', or leave it out"
            yield Issue("advanced.muon_momentum", message)
        return
    has_vectors = advanced.tuning == "full" or advanced.lora_variant == "dora"
    if has_vectors or advanced.algorithm in ("ppo", *SCORED):
        return
    for key in ("advanced.adam_beta1", "advanced.adam_beta2"):
        if key in named:
            yield Issue(
                key,
                "is not read with optimizer = 'muon' and adapters, which Muon updates alone; leave it "
                "out, or set advanced.muon_momentum",
            )


def _unread_offline(config: RunConfig, named: frozenset[str]) -> Iterator[Issue]:
    algorithm = config.advanced.algorithm
    for key, instead in SAMPLED_IN_TRAINING.items():
        if key in named:
            yield Issue(key, f"is not read by {algorithm}; {instead}")
    yield from _unread_without_sampling(config, named, by=algorithm, others=())
    if config.experiment.rollout:
        return
    for key in ("advanced.validation_samples", "advanced.validation_temperature"):
        if config.advanced.validation_dataset and key in named:
            message = (
                "is not read without experiment.rollout, because validation measures the loss; "
                "leave it out"
            )
            yield Issue(key, message)


def _unread_of_trajectories(config: RunConfig, named: frozenset[str]) -> Iterator[Issue]:
    """Keys of sampling that a run on recorded groups does not read. Its temperature must be that of
    the recorded samples, and with an overlong penalty it reads the largest length."""
    if "sampling.rollout_top_p" in named:
        message = "is not read in offline mode; nothing is sampled in training"
        yield Issue("sampling.rollout_top_p", message)
    read = ("training.max_response_length",) if config.advanced.overlong_buffer else ()
    yield from _unread_without_sampling(config, named, by="the offline mode", others=read)


def _unread_without_sampling(
    config: RunConfig, named: frozenset[str], *, by: str, others: Sequence[str]
) -> Iterator[Issue]:
    """Keys that only sampling reads, but for `others`, where validation samples nothing either."""
    rollout, validated = config.experiment.rollout, config.advanced.validation_dataset
    if not (rollout and validated):
        for key in SAMPLED_IN_VALIDATION:
            if key in named and key not in others:
                message = (
                    f"is not read by {by} unless experiment.rollout and "
                    "advanced.validation_dataset are given; leave it out"
                )
                yield Issue(key, message)
    if rollout:
        return
    for key in (*CODE, "advanced.network", "advanced.max_turns", "advanced.max_sample_tokens"):
        if key in named:
            yield Issue(key, "is not read without experiment.rollout; leave it out")
    if config.env:
        yield Issue(
            "env", "is not read without experiment.rollout, because no user code runs; leave it out"
        )


def _keys_in_file(config: RunConfig) -> Iterator[str]:
    """The `section.key` of each key in the file. A key whose value is null counts as left out."""
    for section in ("experiment", "training", "sampling", "advanced"):
        values: BaseModel = getattr(config, section)
        for key in values.model_fields_set:
            if getattr(values, key) is not None:
                yield f"{section}.{key}"
