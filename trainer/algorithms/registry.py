"""The registry of algorithms: it turns the keys of `[advanced]` into an objective and hyperparameters.

`schemas/algorithms.py` lists the keys that an algorithm reads. The `defaults` of each objective are the
values of the keys that a run does not set.
"""

from dataclasses import replace

from schemas.config import Algorithm, RunConfig
from schemas.learner import RULES
from schemas.specs import part_weights
from trainer import grpo
from trainer.algorithms import (
    cispo,
    clip_cov,
    dapo,
    dppo,
    dr_grpo,
    gdpo,
    gmpo,
    gpg,
    gspo,
    importance_sampling,
    kl_cov,
    luspo,
    maxrl,
    ppo,
    reinforce_plus_plus,
    rloo,
    sapo,
)
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import Objective

OBJECTIVES: dict[Algorithm, Objective] = {
    "grpo": grpo.OBJECTIVE,
    "dr_grpo": dr_grpo.OBJECTIVE,
    "dapo": dapo.OBJECTIVE,
    "gspo": gspo.OBJECTIVE,
    "luspo": luspo.OBJECTIVE,
    "gmpo": gmpo.OBJECTIVE,
    "cispo": cispo.OBJECTIVE,
    "sapo": sapo.OBJECTIVE,
    "dppo": dppo.OBJECTIVE,
    "clip_cov": clip_cov.OBJECTIVE,
    "kl_cov": kl_cov.OBJECTIVE,
    "gpg": gpg.OBJECTIVE,
    "gdpo": gdpo.OBJECTIVE,
    "maxrl": maxrl.OBJECTIVE,
    "rloo": rloo.OBJECTIVE,
    "reinforce_plus_plus": reinforce_plus_plus.OBJECTIVE,
    "ppo": ppo.OBJECTIVE,
    "importance_sampling": importance_sampling.OBJECTIVE,
}

SAME_NAME = (
    "clip_low",
    "clip_high",
    "clip_delta",
    "divergence",
    "tau_pos",
    "tau_neg",
    "cov_ratio",
    "cov_low",
    "cov_high",
    "cov_kl_coef",
    "kl_coef",
    "kl_estimator",
    "kl_in",
    "entropy_coef",
    "correction",
    "correction_level",
    "correction_low",
    "correction_high",
    "off_policy_threshold",
    "overlong_buffer",
    "overlong_penalty",
    "mask_truncated",
    "mask_failed",
    "group_baseline",
    "turn_reward_coef",
    "agent_advantages",
    "gamma",
    "gae_lambda",
    "value_clip",
    "value_coef",
)
"""Keys of `[advanced]` that are fields of Hyperparameters under the same name."""


def hyperparameters_of(
    config: RunConfig, *, micro_batch_tokens: int, rules: int = RULES, step: int = 0
) -> Hyperparameters:
    """The hyperparameters of a run: the values that it sets, and its objective's defaults for the
    others. `step` is the number of the step, and `rules` is the number of the rules that the run
    started with (`schemas.learner.RULES`)."""
    advanced = config.advanced
    configured = {key: value for key in SAME_NAME if (value := getattr(advanced, key)) is not None}
    if advanced.loss_aggregation is not None:
        configured["aggregation"] = advanced.loss_aggregation
    objective = OBJECTIVES[advanced.algorithm]
    defaults = objective.defaults
    if advanced.group_baseline and objective.with_baseline is not None and rules >= 2:
        defaults = objective.with_baseline
    return replace(
        defaults,
        **configured,
        temperature=config.sampling.rollout_temperature or 1.0,
        max_response_length=config.training.max_response_length,
        micro_batch_tokens=micro_batch_tokens,
        splits_groups=rules >= 2,
        limits_samples=rules >= 3,
        skips_idle_groups=rules >= 6,
        drops_unread=rules >= 6,
        updates=advanced.updates_per_step,
        part_weights=tuple(part_weights(advanced).items()),
        seed=advanced.seed,
        step=step,
        minibatch_groups=advanced.minibatch_size
        and advanced.minibatch_size // config.training.n_samples_per_prompt,
    )
