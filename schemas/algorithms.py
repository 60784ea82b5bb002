"""Which keys of `[advanced]` each algorithm reads, and what else it requires of a run.

The formulas and the default values are in `trainer/algorithms/registry.py`. This module holds what
submit (`schemas/toml/algorithm_keys.py`) and the run's orchestrator must know without importing torch.
"""

from typing import Literal, get_args

from schemas.config import Advanced, Algorithm, FailedRewards
from schemas.errors import POLICY_FAILURES

CLIPPED = (
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "luspo",
    "gdpo",
    "maxrl",
    "clip_cov",
    "rloo",
    "reinforce_plus_plus",
    "ppo",
)
"""Algorithms that clip the ratio on both sides."""

BOUNDED = (*CLIPPED, "gmpo", "dppo")
"""These, and those that bound the log-ratio or a divergence on both sides."""

UNGROUPED = ("reinforce_plus_plus", "ppo")

PAIRED = ("dpo", "orpo", "simpo", "reward_model")
"""Algorithms that compare the two answers of a row."""

PREFERENCE = (*PAIRED, "kto")
"""Algorithms that learn from preferences between answers."""

SCORED = ("reward_model",)
"""Those of them that train a model which scores answers and writes none."""

OFFLINE = ("sft", *PREFERENCE)
"""Algorithms that learn from the answers of a dataset. Nothing is sampled in training."""

DISTILLED = ("distill",)
"""Algorithms that learn from a teacher at each token of the policy's samples, and not from rewards."""

GROUPED = tuple(
    name for name in get_args(Algorithm) if name not in (*UNGROUPED, *OFFLINE, *DISTILLED)
)
"""Algorithms that compare the samples of a group. A group with equal rewards teaches nothing."""

SAMPLED = (*GROUPED, *UNGROUPED)
"""Algorithms that learn from the rewards of samples."""

PAIRS_OF_GROUPS = ("online_dpo",)
"""Those that learn from two samples of each group, as from a pair of preferences."""

REINFORCED = tuple(name for name in SAMPLED if name not in PAIRS_OF_GROUPS)
"""Those that learn from the advantages of samples."""

COMPARES_PARTS = ("gdpo",)
"""Algorithms whose advantages compare the parts of the reward one by one."""

SUMS_REWARDS = tuple(name for name in REINFORCED if name not in COMPARES_PARTS)
"""Algorithms whose advantages come from one number, to which a penalty can be added."""

OF_SEQUENCES = ("gspo", "luspo", "gmpo")
"""Algorithms whose loss has one term for a sequence, so that its actions share one advantage."""

RECORDED = tuple(name for name in GROUPED if name not in (*PAIRS_OF_GROUPS, *COMPARES_PARTS))
"""Algorithms that can learn from recorded groups: those that compare the rewards within one."""

TAKES_TURN_REWARDS = tuple(
    name for name in GROUPED if name not in (*OF_SEQUENCES, *PAIRS_OF_GROUPS)
)
"""Algorithms whose advantages compare a group and may differ from turn to turn."""

READ_BY: dict[str, tuple[str, ...]] = {
    "clip_low": BOUNDED,
    "clip_high": (*BOUNDED, "cispo"),
    "clip_delta": CLIPPED,
    "divergence": ("dppo",),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    "cov_ratio": ("clip_cov", "kl_cov"),
    "cov_low": ("clip_cov",),
    "cov_high": ("clip_cov",),
    "cov_kl_coef": ("kl_cov",),
    "loss_aggregation": (*REINFORCED, *DISTILLED),
    "kl_coef": REINFORCED,
    "kl_estimator": REINFORCED,
    "kl_in": SUMS_REWARDS,
    "entropy_coef": REINFORCED,
    "entropy_target": REINFORCED,
    "entropy_coef_delta": REINFORCED,
    "entropy_coef_max": REINFORCED,
    "correction_level": REINFORCED,
    "correction_low": REINFORCED,
    "correction_high": REINFORCED,
    "off_policy_threshold": REINFORCED,
    "attest": REINFORCED,
    "filter_groups": GROUPED,
    "max_replacements": GROUPED,
    "curriculum": REINFORCED,
    "minibatch_size": REINFORCED,
    "overlong_buffer": SUMS_REWARDS,
    "mask_truncated": REINFORCED,
    "mask_failed": REINFORCED,
    "failed_reward": SAMPLED,
    "failed_rewards": SAMPLED,
    "overlong_penalty": SUMS_REWARDS,
    "group_baseline": ("reinforce_plus_plus",),
    "turn_reward_coef": TAKES_TURN_REWARDS,
    "agent_advantages": tuple(n for n in TAKES_TURN_REWARDS if n not in COMPARES_PARTS),
    "gamma": ("reinforce_plus_plus", "ppo"),
    "gae_lambda": ("ppo",),
    "value_clip": ("ppo",),
    "value_coef": ("ppo",),
    "critic_lr": ("ppo",),
    "loss_turns": ("sft",),
    "preference_loss": ("dpo", *PAIRS_OF_GROUPS),
    "beta": (*(name for name in PREFERENCE if name not in SCORED), *PAIRS_OF_GROUPS),
    "label_smoothing": ("dpo", *PAIRS_OF_GROUPS),
    "simpo_gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "center_rewards_coefficient": SCORED,
    "teacher": DISTILLED,
    "distill_beta": DISTILLED,
    "teacher_hint": DISTILLED,
    "teacher_base_url": DISTILLED,
    "teacher_api_key_secret": DISTILLED,
}
"""Key -> the algorithms that read it. For any other algorithm the key must not be set."""

DEFAULT_REPLACEMENTS = 4

ENTROPY_COEF_DELTA, ENTROPY_COEF_MAX = 0.005, 1.0
"""How much the weight of the entropy bonus changes in a step, and its bound, as in TRL."""


CLIP_HIGH: dict[str, float] = {
    "dapo": 0.28,
    "gspo": 4e-4,
    "luspo": 4e-4,
    "gmpo": 0.4,
    "clip_cov": 1.0,
}
"""Upper clip bounds of algorithms whose default is not 0.2."""


def is_offline(advanced: Advanced) -> bool:
    """Whether the run learns from the answers of a dataset, so that it samples nothing in training."""
    return advanced.algorithm in OFFLINE


def learns_trajectories(advanced: Advanced) -> bool:
    """Whether the run learns from groups that were recorded before, with their rewards and logprobs."""
    return advanced.execution_mode == "offline" and not is_offline(advanced)


def samples_nothing(advanced: Advanced) -> bool:
    """Whether nothing is sampled in training, so that the batch of a step is rows of the dataset."""
    return is_offline(advanced) or learns_trajectories(advanced)


def filters_groups(advanced: Advanced) -> bool:
    """Whether a group whose rewards are all equal is left out of its batch. DAPO does this by default,
    the other algorithms only when the config says so."""
    wanted = advanced.filter_groups
    return advanced.algorithm == "dapo" if wanted is None else wanted


def replacements(advanced: Advanced) -> int:
    """How often a filtered group may be replaced by a group of another dataset row. After that many
    replacements its slot stays empty. Where a step samples more groups than it needs, the others take
    its place, unless the config says otherwise."""
    if not filters_groups(advanced):
        return 0
    most = advanced.max_replacements
    if most is None and advanced.curriculum and advanced.curriculum.oversampling_factor:
        return 0
    return DEFAULT_REPLACEMENTS if most is None else most


def failed_rewards(advanced: Advanced) -> dict[str, float | Literal["grade"]]:
    """The rewards of samples that failed because of what the policy wrote, by category. A category that
    is not in it is left out of training."""
    single = advanced.failed_rewards or FailedRewards()
    found: dict[str, float | Literal["grade"]] = {}
    for category in sorted(POLICY_FAILURES):
        own = getattr(single, category)
        chosen = advanced.failed_reward if own is None else own
        if chosen is not None and chosen != "drop":
            found[str(category)] = chosen
    return found


COV_LOW, COV_HIGH = 1.0, 5.0
"""Between which covariances Clip-Cov chooses, where the config does not say it."""

DEPTHS: dict[str, range] = {
    "sync": range(1),
    "one_step_off_async": range(1, 2),
    "fully_async": range(1, 65),
    "offline": range(1),
}
"""Execution mode -> the values that max_steps_off_policy may have."""
