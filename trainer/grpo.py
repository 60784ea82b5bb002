"""GRPO: group relative policy optimization (DeepSeekMath, arXiv 2402.03300).

    A_i    = (R_i - mean_G R) / (std_G R + eps)                     per group of G samples
    r_t    = exp(log pi_theta(t) - log mu(t))                       per action t
    loss   = - sum_t w_t min(r_t A_i, clip(r_t, 1 - low, 1 + high) A_i)  +  beta sum_t w_t k3_t
    k3_t   = exp(d) - d - 1,   d = log pi_ref(t) - log pi_theta(t)

Where references differ, this is what was decided:
- The ratio is taken against mu, the policy that sampled, with the logprobs recorded at that moment;
  `advanced.correction` takes it against the proximal policy instead (`trainer/objective/correction.py`).
- std has ddof = 1 and eps = 1e-6 (verl's; TRL has 1e-4). A group whose rewards are all equal gets
  exactly 0, and so does a group with a single reward: it has no std (verl: the reward itself).
- A reward that is None or not finite leaves the baseline; its sample gets advantage 0. It is never
  turned into a reward of 0, which would be a statement about the sample.
- Aggregation is global over the optimizer step (`trainer/objective/aggregate.py`): w_t is
  1 / (S len_i), where S counts the samples that have actions (TRL and Liger count the others too).
- Temperature divides the logits here as it did when sampling.
- Clipping is 0.2 on both sides and beta is 0 unless the run says otherwise. The reference is the
  base model without what was trained. Log-ratios are clamped to +-20 before exp.

The way of a step (weights, micro-batches, gradients) is the same for every objective:
`trainer/step.py`. The others say what differs from this page: `trainer/algorithms/`.
"""

import math
from collections.abc import Sequence

import torch

from schemas.learner import GradedGroup
from trainer.objective.dual_clip import bounded
from trainer.objective.hyperparameters import Settings
from trainer.objective.kl import MAX_LOG_RATIO
from trainer.objective.objective import Actions, Objective, by_group
from trainer.policy import Policy
from trainer.step import accumulate, prepare

EPS = 1e-6


def advantages(rewards: Sequence[float | None]) -> list[float]:
    """The advantage of each sample of one group."""
    known = [r for r in rewards if r is not None and math.isfinite(r)]
    if len(known) < 2 or min(known) == max(known):
        return [0.0] * len(rewards)
    mean = math.fsum(known) / len(known)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in known) / (len(known) - 1))
    return [
        (r - mean) / (std + EPS) if r is not None and math.isfinite(r) else 0.0 for r in rewards
    ]


def clipped_loss(
    log_ratio_M: torch.Tensor,
    advantage_M: torch.Tensor,
    *,
    low: float,
    high: float,
    delta: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pessimistic surrogate of each action, and which actions are clipped (no gradient)."""
    ratio_M = log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free_M = bounded(ratio_M, delta) * advantage_M
    bound_M = ratio_M.clamp(1 - low, 1 + high) * advantage_M
    return -torch.minimum(free_M, bound_M), bound_M < free_M


def loss(actions: Actions, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """What each action costs, and which are clipped."""
    return clipped_loss(
        actions.log_ratio_M,
        actions.advantage_M,
        low=settings.clip_low,
        high=settings.clip_high,
        delta=settings.clip_delta,
    )


OBJECTIVE = Objective(estimate=by_group(advantages), loss=loss, defaults=Settings())


def step(
    policy: Policy, groups: Sequence[GradedGroup], settings: Settings
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Add the gradient of the loss of one batch to the policy's tensors; the optimizer is the
    learner's. Returns metrics and the micro-batch plan."""
    return accumulate(policy, prepare(policy, groups, OBJECTIVE, settings))
