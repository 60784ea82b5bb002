"""GRPO: group relative policy optimization (DeepSeekMath, arXiv 2402.03300).

    A_i    = (R_i - mean_G R) / (std_G R + eps)                     per group of G samples
    r_t    = exp(log pi_theta(t) - log mu(t))                       per action t
    loss   = - sum_t w_t min(r_t A_i, clip(r_t, 1 - low, 1 + high) A_i)  +  beta sum_t w_t k3_t
    k3_t   = exp(d) - d - 1,   d = log pi_ref(t) - log pi_theta(t)

Where references differ, this is what was decided:
- The ratio is taken against mu, the policy that sampled, with the logprobs recorded at that moment.
  There is one optimizer step per batch, so the proximal policy is the current one.
- std has ddof = 1 and eps = 1e-6. A group whose rewards are all equal gets exactly 0, and so does a
  group with a single reward: it has no std.
- A reward that is None or not finite leaves the baseline; its sample gets advantage 0. It is never
  turned into a reward of 0, which would be a statement about the sample.
- Aggregation is global over the optimizer step, so micro-batches do not matter: w_t is 1 / (S
  len_i) for sequence_mean (the paper, our default), 1 / (all actions) for token_mean, and 1 / (S
  max_response_length) for constant; S counts the samples that have actions, len_i the actions of a
  sample over all its rows.
- Temperature divides the logits here as it did when sampling.
- Clipping is 0.2 on both sides and beta is 0 unless the run says otherwise. The reference is the
  base model without what was trained. Log-ratios are clamped to +-20 before exp.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from schemas.config import LossAggregation, RunConfig
from schemas.learning import GradedGroup
from trainer.batch import Example, MicroBatch, pack
from trainer.metrics import Means
from trainer.policy import Policy

EPS = 1e-6
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What the formula leaves open."""

    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    aggregation: LossAggregation = "sequence_mean"
    max_response_length: int = 1
    micro_batch_tokens: int = 4096

    @classmethod
    def of(cls, config: RunConfig, *, micro_batch_tokens: int) -> "Settings":
        """The run's own values, and GRPO's where the run says nothing."""
        advanced, default = config.advanced, cls()
        return cls(
            temperature=config.sampling.rollout_temperature or 1.0,
            clip_low=advanced.clip_low or default.clip_low,
            clip_high=advanced.clip_high or default.clip_high,
            kl_coef=advanced.kl_coef or default.kl_coef,
            aggregation=advanced.loss_aggregation or default.aggregation,
            max_response_length=config.training.max_response_length,
            micro_batch_tokens=micro_batch_tokens,
        )


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
    log_ratio_M: torch.Tensor, advantage_M: torch.Tensor, *, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pessimistic surrogate of each action, and which actions are clipped (no gradient)."""
    ratio_M = log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free_M = ratio_M * advantage_M
    bound_M = ratio_M.clamp(1 - low, 1 + high) * advantage_M
    return -torch.minimum(free_M, bound_M), bound_M < free_M


def k3(log_ratio_M: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(pi || ref) from d = log ref - log pi: never negative."""
    d_M = log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d_M.exp() - d_M - 1


def token_weights(examples: Iterable[Example], settings: Settings) -> dict[int, float]:
    """w_t of each sample's actions. They sum to 1 over the step (but for `constant`)."""
    lengths: dict[int, int] = {}
    for example in examples:
        lengths[example.sample] = lengths.get(example.sample, 0) + example.num_actions
    lengths = {sample: length for sample, length in lengths.items() if length}
    weight_of: dict[LossAggregation, Callable[[int], float]] = {
        "sequence_mean": lambda length: 1 / (len(lengths) * length),
        "token_mean": lambda length: 1 / sum(lengths.values()),
        "constant": lambda length: 1 / (len(lengths) * settings.max_response_length),
    }
    return {sample: weight_of[settings.aggregation](n) for sample, n in lengths.items()}


def step(
    policy: Policy, groups: Sequence[GradedGroup], settings: Settings
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Add the gradient of the loss of one batch to the policy's tensors; the optimizer is the
    learner's. Returns metrics and the micro-batch plan."""
    samples = [sample for group in groups for sample in group.samples]
    advantage_S = [a for group in groups for a in advantages(group.rewards)]
    examples = [Example(i, row) for i, sample in enumerate(samples) for row in sample.sequences]
    weight_S = token_weights(examples, settings)
    means, plan = Means(), []
    for micro in pack(
        examples,
        micro_batch_tokens=settings.micro_batch_tokens,
        share=policy.shares_prompts,
        device=policy.device,
    ):
        loss = micro_loss(policy, micro, advantage_S, weight_S, settings, means)
        if loss.requires_grad:
            loss.backward()
        plan.append(micro.num_tokens)
    return means.values(), tuple(plan)


def micro_loss(
    policy: Policy,
    micro: MicroBatch,
    advantage_S: Sequence[float],
    weight_S: dict[int, float],
    settings: Settings,
    means: Means,
) -> torch.Tensor:
    """This micro-batch's share of the step's loss."""
    logprobs_M, entropy_M = policy.logprobs(micro, temperature=settings.temperature)
    sample_M = micro.sample_M.tolist()
    advantage_M = logprobs_M.new_tensor([advantage_S[i] for i in sample_M])
    weight_M = logprobs_M.new_tensor([weight_S[i] for i in sample_M])

    log_ratio_M = logprobs_M - micro.behaviour_M.to(logprobs_M.dtype)
    loss_M, clipped_M = clipped_loss(
        log_ratio_M, advantage_M, low=settings.clip_low, high=settings.clip_high
    )
    kl_M = k3(-log_ratio_M.detach())
    means.add("train/sampler_kl", kl_M)
    means.add("train/sampler_mismatch", log_ratio_M.detach().abs())
    if settings.kl_coef:
        with torch.no_grad():
            reference_M, _ = policy.logprobs(
                micro, temperature=settings.temperature, reference=True
            )
        kl_M = k3(reference_M - logprobs_M)
        loss_M = loss_M + settings.kl_coef * kl_M

    loss = (weight_M * loss_M).sum()
    means.add_sum("train/loss", loss)
    means.add("train/kl", kl_M.detach())
    means.add("train/clip_ratio", clipped_M)
    means.add("train/entropy_loss", entropy_M)
    return loss
