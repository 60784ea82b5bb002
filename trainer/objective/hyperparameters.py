"""The hyperparameters of all objectives in one flat class. Each objective reads those that it uses.

The defaults are GRPO's. Every other objective declares its own defaults where they differ. The values
that a run sets take precedence (`trainer/algorithms/registry.py`). This module does not import torch.
"""

from dataclasses import dataclass

from schemas.algorithms import is_offline
from schemas.config import (
    Correction,
    CorrectionLevel,
    Divergence,
    KlEstimator,
    KlPlace,
    LossAggregation,
)
from schemas.learner import LearnerJob

DEFAULT_MICRO_BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The hyperparameters of one run. Most are keys of `[advanced]`, which docs/config.md explains."""

    temperature: float = 1.0
    """the logits are divided by it, in the learner as in the sampler"""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """the ratio is clipped to the range from 1 - clip_low to 1 + clip_high"""
    clip_delta: float | None = None
    """bound of the ratio where the advantage is negative (`trainer/objective/dual_clip.py`); None:
    off"""
    divergence: Divergence = "tv"
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    """how soon the gradient of SAPO fades, by the sign of the advantage"""
    cov_ratio: float = 2e-4
    """the share of all actions that Clip-Cov and KL-Cov choose"""
    cov_low: float = 1.0
    cov_high: float = 5.0
    """between which covariances Clip-Cov draws"""
    cov_kl_coef: float = 1.0
    """the penalty of the actions that KL-Cov chooses"""
    part_weights: tuple[tuple[str, float], ...] = ()
    """the parts of the reward that GDPO normalises one by one, with their weights"""
    kl_coef: float = 0.0
    """beta, the weight of the KL; with 0 no reference pass is computed"""
    kl_estimator: KlEstimator = "k3"
    kl_in: KlPlace = "loss"
    entropy_coef: float = 0.0
    """weight of the entropy bonus; with 0 the entropy has no gradient"""
    aggregation: LossAggregation = "sequence_mean"
    max_response_length: int = 1
    limits_samples: bool = True
    """whether max_response_length limits a sample as a whole, and not each of its completions"""
    micro_batch_tokens: int = 4096
    splits_groups: bool = True
    """whether a group that shares a prompt is split when it does not fit into one micro-batch"""
    skips_idle_groups: bool = True
    """whether groups without a gradient have no backward pass (`trainer/objective/batch.py`)"""
    drops_unread: bool = True
    """whether tokens that no action is predicted from are left out (`trainer/forward/packing.py`)"""
    updates: int = 1
    """passes over the batch, each with one optimizer update for every mini-batch"""
    minibatch_groups: int | None = None
    """groups of a mini-batch, at most; None: all groups of the step"""
    correction: Correction = "ratio"
    """which policy the ratio is taken against (`trainer/objective/correction.py`)"""
    correction_level: CorrectionLevel = "token"
    correction_low: float = 0.5
    correction_high: float = 2.0
    off_policy_threshold: float | None = None
    """threshold of the off-policy mask (`trainer/objective/sequence_mask.py`); None: off"""
    overlong_buffer: int = 0
    """tokens before max_response_length in which the penalty grows; 0: off"""
    overlong_penalty: float = 1.0
    mask_truncated: bool = False
    """whether samples that were cut off at a limit of tokens are left out of the loss"""
    mask_failed: bool = False
    """whether samples that failed, and have a reward nevertheless, are left out of the loss"""
    group_baseline: bool = False
    turn_reward_coef: float = 0.0
    """the weight of the rewards of single turns (`trainer/objective/turns.py`); 0: off"""
    agent_advantages: bool = False
    """whether agents are compared with themselves (`trainer/objective/agents.py`)"""
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_clip: float = 0.2
    value_coef: float = 0.1
    seed: int = 0
    step: int = 0
    """the seed of the run and the number of the step, for what an objective draws"""


def out_of_memory(job: LearnerJob) -> str:
    """The error message for a step that does not fit into memory. It names the settings to lower. Peak
    memory grows with the number of tokens in a micro-batch."""
    advanced = job.config.advanced
    tokens = advanced.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
    longest = (
        f"advanced.max_sequence_length ({advanced.max_sequence_length})"
        if is_offline(advanced)
        else f"training.max_response_length ({job.config.training.max_response_length})"
    )
    full = "" if advanced.tuning == "lora" else ". advanced.tuning = 'lora' needs far less memory"
    return (
        f"the learner's device ran out of memory: lower advanced.micro_batch_tokens (it is {tokens}), "
        f"then {longest}, because a sample is never split between passes{full}"
    )
