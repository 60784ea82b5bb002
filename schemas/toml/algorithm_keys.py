"""Keys of `[advanced]` that contradict the algorithm or the execution mode of a run.

`schemas/algorithms.py` says which algorithm reads which key. A run whose config sets a key that its
algorithm does not read is refused at submit. Such a key is never ignored.
"""

import difflib
import re
from collections.abc import Iterator

from schemas.algorithms import (
    CLIP_HIGH,
    COMPARES_PARTS,
    COV_HIGH,
    COV_LOW,
    DEPTHS,
    DISTILLED,
    ENTROPY_COEF_MAX,
    GROUPED,
    PAIRS_OF_GROUPS,
    READ_BY,
    RECORDED,
    REINFORCED,
    SAMPLED,
    SCORED,
    SUMS_REWARDS,
    failed_rewards,
    filters_groups,
    is_offline,
    learns_trajectories,
    samples_nothing,
)
from schemas.config import Advanced, RunConfig
from schemas.errors import Issue
from schemas.models.teacher import GROUND_TRUTH, SELF
from schemas.sampling import PROVIDER_PREFIX
from schemas.specs import part_weights

SAME_IDEA = {"beta": "kl_coef", "kl_coef": "beta"}
"""Keys for the distance from the reference, which many trainers give one name."""


def algorithm_issues(config: RunConfig) -> Iterator[Issue]:
    """Keys that the algorithm does not read, and values that contradict each other."""
    advanced = config.advanced
    yield from _unread_issues(advanced)
    yield from _correction_issues(advanced)
    yield from _minibatch_issues(config)
    yield from _preference_issues(advanced)
    if advanced.algorithm in DISTILLED:
        yield from _distillation_issues(config)
    yield from _reward_model_issues(config)
    if advanced.algorithm in COMPARES_PARTS:
        yield from _part_issues(advanced)
    yield from _entropy_issues(advanced)
    clip_high = advanced.clip_high or CLIP_HIGH.get(advanced.algorithm, 0.2)
    if advanced.clip_delta is not None and advanced.clip_delta <= 1 + clip_high:
        yield Issue(
            "advanced.clip_delta",
            f"must be above 1 + clip_high ({1 + clip_high:g}), got {advanced.clip_delta:g}",
        )
    low, high = (
        default if value is None else value
        for value, default in ((advanced.cov_low, COV_LOW), (advanced.cov_high, COV_HIGH))
    )
    if low >= high:
        yield Issue(
            "advanced.cov_low",
            f"must be below advanced.cov_high ({high:g}), got {low:g}; set both",
        )
    buffer, longest = advanced.overlong_buffer, config.training.max_response_length
    if buffer is not None and buffer > longest:
        yield Issue(
            "advanced.overlong_buffer",
            f"must be at most training.max_response_length ({longest}), got {buffer}",
        )
    if advanced.overlong_penalty is not None and not buffer:
        yield Issue(
            "advanced.overlong_penalty",
            "needs advanced.overlong_buffer; set it, or leave this key out",
        )
    if advanced.max_replacements is not None and not filters_groups(advanced):
        yield Issue(
            "advanced.max_replacements",
            "needs advanced.filter_groups = true; set it, or leave this key out",
        )
    if advanced.mask_failed and not samples_nothing(advanced) and not failed_rewards(advanced):
        yield Issue(
            "advanced.mask_failed",
            "needs advanced.failed_reward or failed_rewards, because a failed sample has no reward "
            "otherwise and is left out anyway; set one of them, or leave this key out",
        )
    if advanced.algorithm in GROUPED and config.training.n_samples_per_prompt < 2:
        yield Issue(
            "training.n_samples_per_prompt",
            f"must be at least 2 for {advanced.algorithm}, which compares the samples of a group; "
            "use ppo or reinforce_plus_plus to learn from one sample",
        )


def mode_issues(advanced: Advanced) -> Iterator[Issue]:
    """Keys that contradict the execution mode."""
    mode, depth = advanced.execution_mode, advanced.max_steps_off_policy
    if is_offline(advanced):
        yield from _sampling_issues(advanced)
        return
    if learns_trajectories(advanced):
        yield from _recorded_issues(advanced)
        return
    allowed = DEPTHS[mode]
    if depth is None or depth in allowed:
        return
    low, high = allowed.start, allowed.stop - 1
    must = f"must be {low}" if low == high else f"must be from {low} to {high}"
    other = "sync" if depth == 0 else "fully_async"
    yield Issue(
        "advanced.max_steps_off_policy",
        f"{must} in {mode} mode, got {depth}; for {depth}, set advanced.execution_mode to {other!r}",
    )


def _sampling_issues(advanced: Advanced) -> Iterator[Issue]:
    """Keys that concern sampling ahead, of a run that samples nothing."""
    changed = {
        "execution_mode": advanced.execution_mode != "sync",
        "max_steps_off_policy": bool(advanced.max_steps_off_policy),
        "weight_sync_interval": advanced.weight_sync_interval != 1,
    }
    for key in (key for key, is_changed in changed.items() if is_changed):
        yield Issue(
            f"advanced.{key}",
            f"has no meaning for {advanced.algorithm}, which samples nothing; leave it out",
        )


def _recorded_issues(advanced: Advanced) -> Iterator[Issue]:
    """Keys that contradict a run on recorded groups, which samples and grades nothing."""
    if advanced.algorithm not in RECORDED:
        yield Issue(
            "advanced.algorithm",
            f"must be one of {', '.join(RECORDED)} in offline mode, which compare the rewards of a "
            f"recorded group, got {advanced.algorithm!r}",
        )
    changed = {
        "max_steps_off_policy": bool(advanced.max_steps_off_policy),
        "weight_sync_interval": advanced.weight_sync_interval != 1,
        "filter_groups": advanced.filter_groups is not None,
        "max_replacements": advanced.max_replacements is not None,
        "curriculum": advanced.curriculum is not None,
        "attest": advanced.attest is not None,
        "failed_reward": advanced.failed_reward is not None,
        "failed_rewards": advanced.failed_rewards is not None,
    }
    for key in (key for key, is_changed in changed.items() if is_changed):
        yield Issue(
            f"advanced.{key}",
            "has no meaning in offline mode, whose groups were sampled and graded before; leave it out",
        )


def _unread_issues(advanced: Advanced) -> Iterator[Issue]:
    for key, readers in READ_BY.items():
        if getattr(advanced, key) is not None and advanced.algorithm not in readers:
            yield Issue(
                f"advanced.{key}",
                f"has no meaning for {advanced.algorithm}; leave it out, or use {_choice_of(readers)}",
                _same_idea(key, advanced),
            )
    has_pairs = advanced.algorithm in PAIRS_OF_GROUPS
    if (is_offline(advanced) or has_pairs) and advanced.correction != "ratio":
        why = "compares answers without a ratio" if has_pairs else "samples nothing"
        yield Issue(
            "advanced.correction",
            f"has no meaning for {advanced.algorithm}, which {why}; leave it out",
        )
    if has_pairs and advanced.updates_per_step != 1:
        yield Issue(
            "advanced.updates_per_step",
            f"must be 1 for {advanced.algorithm}, got {advanced.updates_per_step}; leave it out",
        )
    if is_offline(advanced) and advanced.updates_per_step != 1:
        yield Issue(
            "advanced.updates_per_step",
            f"must be 1 for {advanced.algorithm}, got {advanced.updates_per_step}; set "
            "training.total_epochs instead",
        )


def _choice_of(algorithms: tuple[str, ...]) -> str:
    """Algorithms as a choice in a sentence."""
    most = "a reinforcement learning algorithm"
    if algorithms == (*REINFORCED, *DISTILLED):
        return f"{most}, or {' or '.join(DISTILLED)}"
    if algorithms in (SAMPLED, REINFORCED, SUMS_REWARDS):
        others = ", ".join(sorted(set(SAMPLED) - set(algorithms)))
        return f"{most} other than {others}" if others else most
    return f"one of: {', '.join(algorithms)}"


def _same_idea(key: str, advanced: Advanced) -> str | None:
    """The key that the algorithm reads instead of `key`, if there is one."""
    other = SAME_IDEA.get(key)
    is_read = other is not None and advanced.algorithm in READ_BY[other]
    return f"advanced.{other}" if is_read else None


def _preference_issues(advanced: Advanced) -> Iterator[Issue]:
    if advanced.label_smoothing is not None and advanced.preference_loss in ("ipo", "hinge"):
        yield Issue(
            "advanced.label_smoothing",
            f"has no meaning with preference_loss = {advanced.preference_loss!r}; leave it out, or use "
            "'sigmoid' or 'sigmoid_norm'",
        )
    if advanced.algorithm == "kto" and advanced.batch_size < 2:
        yield Issue(
            "advanced.batch_size",
            f"must be at least 2 for kto, got {advanced.batch_size}: its baseline pairs the prompt of a "
            "row with the answer of another; set 16",
        )


PLACE = re.compile(r"\{[^{}]{1,64}\}")
"""A name in braces in `advanced.teacher_hint`, which may be meant for a value of the row."""


def _means_ground_truth(place: str) -> bool:
    known = [GROUND_TRUTH.strip("{}"), "label"]
    close = difflib.get_close_matches(place.strip("{} ").lower(), known, n=1, cutoff=0.75)
    return place != GROUND_TRUTH and bool(close)


def _distillation_issues(config: RunConfig) -> Iterator[Issue]:
    """A run that distils has a teacher, and reads no ratio and no reward."""
    advanced = config.advanced
    if advanced.teacher is None:
        yield Issue(
            "advanced.teacher",
            f"is missing; name the model that {advanced.algorithm} learns from, like run@last or a "
            "directory",
        )
    elif advanced.teacher == SELF and advanced.teacher_hint is None:
        yield Issue(
            "advanced.teacher",
            f"is {SELF!r}, which has nothing to teach without a hint; set advanced.teacher_hint, or "
            "name another model",
        )
    yield from _teacher_server_issues(config)
    hint = advanced.teacher_hint or ""
    if advanced.teacher_hint is not None and not hint.strip():
        yield Issue("advanced.teacher_hint", "is blank; write a hint, or leave this key out")
    if wrong := [place for place in PLACE.findall(hint) if _means_ground_truth(place)]:
        yield Issue(
            "advanced.teacher_hint",
            f"has {wrong[0]}, which is never replaced, so the teacher would read it as it is; "
            f"write {GROUND_TRUTH} for the label of a row",
        )
    if advanced.correction != "ratio":
        yield Issue(
            "advanced.correction",
            f"has no meaning for {advanced.algorithm}, whose loss has no ratio; leave it out",
        )
    if advanced.updates_per_step != 1:
        yield Issue(
            "advanced.updates_per_step",
            f"must be 1 for {advanced.algorithm}, got {advanced.updates_per_step}; raise "
            "advanced.max_steps instead",
        )


def _teacher_server_issues(config: RunConfig) -> Iterator[Issue]:
    """A teacher on a server tells the log-probability of each token that was sampled, at a temperature
    of 1, and nothing else of its distribution."""
    advanced, temperature = config.advanced, config.sampling.rollout_temperature
    if not (advanced.teacher or "").startswith(PROVIDER_PREFIX):
        for key in ("teacher_base_url", "teacher_api_key_secret"):
            if getattr(advanced, key) is not None:
                yield Issue(
                    f"advanced.{key}",
                    f"has no meaning with teacher = {advanced.teacher!r}, which is not on a server; "
                    "write teacher = 'provider:NAME' with a model there, or leave this key out",
                )
        return
    if advanced.teacher_base_url is None:
        yield Issue(
            "advanced.teacher_base_url",
            f"is missing; set it to the vLLM server that has {advanced.teacher!r}, such as "
            "https://10.0.0.5:8000/v1. Other providers tell no log-probabilities of given answers, so "
            "train on theirs with algorithm = 'sft'",
        )
    if temperature != 1.0:
        yield Issue(
            "sampling.rollout_temperature",
            "must be 1 with a teacher on a server, whose log-probabilities are those of temperature 1, "
            f"got {temperature:g}; leave it out, or name a checkpoint as advanced.teacher",
        )
    if advanced.teacher_hint is not None:
        yield Issue(
            "advanced.teacher_hint",
            "has no meaning with a teacher on a server, which reads the student's own tokens; leave it "
            "out, or name a checkpoint as advanced.teacher",
        )
    if advanced.distill_beta not in (None, 1.0):
        yield Issue(
            "advanced.distill_beta",
            f"must be 1 (the reverse KL) with a teacher on a server, got {advanced.distill_beta:g}: "
            "other divergences need its whole distribution; leave it out, or name a checkpoint as "
            "advanced.teacher",
        )


def _reward_model_issues(config: RunConfig) -> Iterator[Issue]:
    """Keys of a model that writes answers, in the config of one that scores them."""
    if config.advanced.algorithm not in SCORED:
        return
    if config.advanced.tuning == "full":
        yield Issue(
            "advanced.tuning",
            "must be 'lora' for reward_model, got 'full': it trains an adapter and a head that scores; "
            "leave it out",
        )
    if config.experiment.rollout:
        yield Issue(
            "experiment.rollout",
            "is not read by reward_model, which writes no answers: validation measures the loss and "
            "the accuracy of pairs; leave it out",
        )


def _entropy_issues(advanced: Advanced) -> Iterator[Issue]:
    """The keys of a weight that changes need its target, and the weight must begin below its bound."""
    if advanced.entropy_target is None:
        for key in ("entropy_coef_delta", "entropy_coef_max"):
            if getattr(advanced, key) is not None and not is_offline(advanced):
                yield Issue(
                    f"advanced.{key}",
                    "needs advanced.entropy_target; set it, or leave this key out",
                )
        return
    most = advanced.entropy_coef_max or ENTROPY_COEF_MAX
    if (advanced.entropy_coef or 0.0) > most:
        yield Issue(
            "advanced.entropy_coef",
            f"must be at most entropy_coef_max ({most:g}), got {advanced.entropy_coef:g}",
        )


def _minibatch_issues(config: RunConfig) -> Iterator[Issue]:
    """A group is never divided, and all mini-batches of a full step have the same size."""
    size, group = config.advanced.minibatch_size, config.training.n_samples_per_prompt
    if size is None or is_offline(config.advanced):
        return
    samples = config.training.rollout_batch_size * group
    if size % group:
        yield Issue(
            "advanced.minibatch_size",
            f"must be a multiple of training.n_samples_per_prompt ({group}), because a group is never "
            f"divided, got {size}",
        )
    elif samples % size:
        yield Issue(
            "advanced.minibatch_size",
            f"must divide the samples of a step, which are rollout_batch_size x n_samples_per_prompt "
            f"= {samples}, got {size}",
        )


def _part_issues(advanced: Advanced) -> Iterator[Issue]:
    """Rewards that do not consist of named parts."""
    parts = part_weights(advanced)
    if not advanced.rewards or len(parts) < 2:
        yield Issue(
            "advanced.rewards",
            f"must name reward functions for {advanced.algorithm}, which compares the parts of a "
            "reward, at least two with those of advanced.rubrics and advanced.reward_models, got "
            f"{len(parts)}",
        )
    for name, weight in parts.items():
        if weight == 0:
            yield Issue(
                "advanced.rewards",
                f"must give {name!r} a weight other than 0 for {advanced.algorithm}; leave it out, or "
                "set its weight",
            )
    fixed = [why for why, reward in failed_rewards(advanced).items() if reward != "grade"]
    if fixed:
        key = "failed_reward" if advanced.failed_rewards is None else "failed_rewards"
        yield Issue(
            f"advanced.{key}",
            f"must be 'drop' or 'grade' for {advanced.algorithm}, because a number for {fixed[0]} has "
            "no parts",
        )


def _correction_issues(advanced: Advanced) -> Iterator[Issue]:
    reads = {
        "ratio": (),
        "decoupled": ("correction_level",),
        "truncated": ("correction_level", "correction_high"),
        "masked": ("correction_level", "correction_low", "correction_high"),
    }[advanced.correction]
    for key in ("correction_level", "correction_low", "correction_high"):
        if getattr(advanced, key) is not None and key not in reads:
            yield Issue(
                f"advanced.{key}",
                f"has no meaning with correction = {advanced.correction!r}; leave it out",
            )
