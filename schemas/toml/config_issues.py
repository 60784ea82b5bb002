"""Checks of a config whose keys are all valid by themselves. They find keys that contradict each other,
keys that the run would not read, features that are not built, and steps that are too large for an event.

These checks need neither the dataset nor the model. `producers/core/validation/validate.py` runs them
together with the checks that do.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath

from schemas.algorithms import OFFLINE, is_offline, learns_trajectories, samples_nothing
from schemas.config import EvalConfig, Experiment, RunConfig
from schemas.deployments import NAME_RULE, is_deployment_name
from schemas.errors import Issue
from schemas.limits import MOST_OFFLINE_ROWS, longest_answer, most_groups, most_samples
from schemas.models.reward_model import score_names
from schemas.network import NetworkAddress, parse_address
from schemas.specs import part_weights, rubric_specs
from schemas.toml.algorithm_keys import algorithm_issues, mode_issues
from schemas.toml.curriculum_keys import curriculum_issues
from schemas.toml.env_vars import reserved_env
from schemas.toml.provider_keys import provider_issues
from schemas.toml.reward_model_keys import reward_model_issues
from schemas.toml.rubric_keys import rubric_issues
from schemas.toml.unread_keys import unread_issues

LONGEST_NAME, DEEPEST = 255, 31
"""The most bytes in a name, and the most levels in a path inside a rollout. Every file system and every
commit can hold these."""

LOWEST_TEMPERATURE = 0.01
"""Of a temperature that is not 0. Divided by less, logits may not be finite, and vLLM counts a lower
temperature as this one, so that its logprobs would not be the learner's."""


def config_issues(config: RunConfig | EvalConfig) -> Iterator[Issue]:
    """Every issue that can be found in the config alone."""
    yield from unsupported(config)
    yield from _temperature_issues(config)
    yield from _cross_key_issues(config)
    yield from _entrypoint_issues(config.experiment)
    yield from _env_var_issues(config)
    yield from _network_issues(config)
    yield from rubric_issues(config)
    yield from provider_issues(config)
    if isinstance(config, EvalConfig):
        yield from _too_many_samples("evaluation.n", config)
        return
    yield from reward_model_issues(config)
    yield from algorithm_issues(config)
    yield from mode_issues(config.advanced)
    yield from curriculum_issues(config)
    yield from unread_issues(config)
    yield from _deploy_issues(config)
    yield from _validation_key_issues(config)
    yield from _step_size_issues(config)


def unsupported(config: RunConfig | EvalConfig) -> Iterator[Issue]:
    """Issues with values that are valid but that this version does not support."""
    if not isinstance(config, RunConfig):
        return
    if config.sampling.rollout_top_p != 1.0:
        yield Issue(
            "sampling.rollout_top_p",
            f"must be 1.0 in training, got {config.sampling.rollout_top_p:g}: a cut-off "
            "distribution biases the ratio of every token",
        )
    if config.sampling.rollout_temperature == 0 and not is_offline(config.advanced):
        yield Issue(
            "sampling.rollout_temperature",
            "must be above 0 in training, got 0: greedy samples of a prompt are all equal, so nothing "
            "is learned from them. Set 1.0; advanced.validation_temperature may be 0",
        )
    is_unscored = samples_nothing(config.advanced) and not config.experiment.rollout
    for name in ("rewards", "rubrics", "reward_models"):
        if is_unscored and getattr(config.advanced, name):
            yield Issue(
                f"advanced.{name}",
                f"has no meaning for {config.advanced.algorithm} without a rollout; leave it out, or "
                "set experiment.rollout",
            )


def _temperature_issues(config: RunConfig | EvalConfig) -> Iterator[Issue]:
    """Temperatures that are too low to divide logits by."""
    zero = "0, which is greedy, or "
    if isinstance(config, EvalConfig):
        found = [("advanced.temperature", zero, config.advanced.temperature)]
    else:
        found = [("advanced.validation_temperature", zero, config.advanced.validation_temperature)]
        if not is_offline(config.advanced):
            found.append(("sampling.rollout_temperature", "", config.sampling.rollout_temperature))
    for key, also, value in found:
        if 0 < value < LOWEST_TEMPERATURE:
            yield Issue(
                key,
                f"must be {also}at least {LOWEST_TEMPERATURE:g}, got {value!r}: the logits are divided "
                "by it, and would be too large",
            )


def _cross_key_issues(config: RunConfig | EvalConfig) -> Iterator[Issue]:
    experiment = config.experiment
    if experiment.branch and experiment.commit_sha:
        yield Issue(
            "experiment.commit_sha",
            "cannot be set together with experiment.branch; keep one, not both",
        )
    if isinstance(config, EvalConfig) or not samples_nothing(config.advanced):
        yield from _missing_user_code(experiment)
    section = "training" if isinstance(config, RunConfig) else "advanced"
    lengths = config.training if isinstance(config, RunConfig) else config.advanced
    if longest_answer(lengths) > lengths.max_response_length:
        yield Issue(
            f"{section}.max_answer_length",
            f"must be at most {section}.max_response_length ({lengths.max_response_length}), which "
            f"limits all answers of a sample together, got {lengths.max_answer_length}",
        )


def _missing_user_code(experiment: Experiment) -> Iterator[Issue]:
    for name in ("rollout", "entrypoint"):
        if not getattr(experiment, name):
            yield Issue(
                f"experiment.{name}",
                f"is missing; add it (only {', '.join(OFFLINE)} and the execution mode offline run "
                "without user code)",
            )


def _entrypoint_issues(experiment: Experiment) -> Iterator[Issue]:
    entrypoint = experiment.entrypoint
    if entrypoint is not None and (message := _bad_entrypoint(entrypoint)):
        yield Issue("experiment.entrypoint", message)


def _bad_entrypoint(entrypoint: str) -> str | None:
    path = PurePosixPath(entrypoint)
    if path.is_absolute() or ".." in path.parts or "\\" in entrypoint or "\0" in entrypoint:
        return f"must be a path inside its rollout, got {entrypoint!r}"
    if any(len(part.encode()) > LONGEST_NAME for part in path.parts) or len(path.parts) > DEEPEST:
        return (
            f"must have names of at most {LONGEST_NAME} bytes and at most {DEEPEST} levels, "
            f"got {entrypoint[:60]!r}..."
        )
    if path.suffix != ".py":
        return f"must be a Python file like 'main.py', got {entrypoint!r}"
    return None


def _env_var_issues(config: RunConfig | EvalConfig) -> Iterator[Issue]:
    for name in config.env:
        if reason := reserved_env(name):
            yield Issue(f"env.{name}", reason)
    seen: set[str] = set()
    for index, name in enumerate(config.secrets.required):
        key = f"secrets.required[{index}]"
        if name in seen:
            yield Issue(key, f"names {name} twice; keep one")
        if reason := reserved_env(name):
            yield Issue(key, f"names {name}, which {reason}")
        if name in config.env:
            yield Issue(key, f"names {name}, which [env] sets too; keep one")
        seen.add(name)


def _network_issues(config: RunConfig | EvalConfig) -> Iterator[Issue]:
    seen: set[NetworkAddress] = set()
    for index, text in enumerate(config.advanced.network):
        key = f"advanced.network[{index}]"
        try:
            address = parse_address(text)
        except ValueError as error:
            yield Issue(key, f"{error}, got {text[:LONGEST_NAME]!r}")
            continue
        if address in seen:
            yield Issue(key, f"names {address} twice; keep one")
        seen.add(address)


def _validation_key_issues(config: RunConfig) -> Iterator[Issue]:
    """Keys that concern validation, in a run without a validation dataset."""
    advanced = config.advanced
    if advanced.validation_dataset is not None:
        yield from _too_many_samples("advanced.validation_samples", config)
        if learns_trajectories(advanced) and not config.experiment.rollout:
            yield Issue(
                "advanced.validation_dataset",
                "is not read without experiment.rollout, because a run on recorded groups measures no "
                "loss on rows; set experiment.rollout, or leave this key out",
            )
        return
    changed = {
        "checkpoints.eval_interval": config.checkpoints.eval_interval is not None,
        "advanced.validation_samples": advanced.validation_samples != 1,
        "advanced.validation_temperature": advanced.validation_temperature != 0,
    }
    for key in (key for key, is_changed in changed.items() if is_changed):
        yield Issue(key, "needs advanced.validation_dataset; set it, or leave this key out")


def _step_size_issues(config: RunConfig) -> Iterator[Issue]:
    """A step whose groups or rows would not fit into one event."""
    if is_offline(config.advanced):
        rows = config.advanced.batch_size
        if rows > MOST_OFFLINE_ROWS:
            yield Issue("advanced.batch_size", f"must be at most {MOST_OFFLINE_ROWS}, got {rows}")
        return
    if learns_trajectories(config.advanced):
        most = MOST_OFFLINE_ROWS
        if (groups := config.training.rollout_batch_size) > most:
            yield Issue("training.rollout_batch_size", f"must be at most {most}, got {groups}")
        return
    too_many = tuple(_too_many_samples("training.n_samples_per_prompt", config))
    yield from too_many
    parts = list(part_weights(config.advanced))
    samples, groups = config.training.n_samples_per_prompt, config.training.rollout_batch_size
    if not too_many and groups > (most := most_groups(samples, parts)):
        yield Issue(
            "training.rollout_batch_size",
            f"must be at most {most} with {samples} samples per prompt, got {groups}",
        )


def _too_many_samples(key: str, config: RunConfig | EvalConfig) -> Iterator[Issue]:
    """A group whose grades would not fit into one event; `key` says how many samples it has."""
    section, _, name = key.partition(".")
    samples: int = getattr(getattr(config, section), name)
    rewards = [reward.name for reward in config.advanced.rewards]
    rubrics = rubric_specs(config.advanced)
    models = score_names(config.advanced.reward_models) if isinstance(config, RunConfig) else ()
    most = most_samples(rewards, rubrics, models)
    if samples > most:
        num = len(rewards) + len(rubrics) + len(models)
        parts = f" with {num} reward functions" if num else ""
        yield Issue(key, f"must be at most {most}{parts}, got {samples}")


def _deploy_issues(config: RunConfig) -> Iterator[Issue]:
    """Issues with `advanced.deploy`, which would only show when the run has ended."""
    advanced, name = config.advanced, config.deploy_as
    if advanced.deploy is None:
        if advanced.deploy_name is not None:
            yield Issue("advanced.deploy_name", 'needs advanced.deploy = "best"; set it too')
        return
    if advanced.tuning != "lora":
        yield Issue("advanced.deploy", 'needs advanced.tuning = "lora", got "full"')
    if advanced.validation_dataset is None:
        yield Issue("advanced.deploy", "compares held-out rewards; set advanced.validation_dataset")
    elif samples_nothing(advanced) and not config.experiment.rollout:
        yield Issue("advanced.deploy", "compares held-out rewards; set experiment.rollout")
    if name is not None and not is_deployment_name(name):
        yield Issue("advanced.deploy_name", f"is {name!r} by default; set a name with {NAME_RULE}")
