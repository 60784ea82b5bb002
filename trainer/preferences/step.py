"""One training step from preferences, from pairs of answers to updated weights.

This file is the step of every objective in this folder. Read it from `step`, which the learner calls.
An objective (`trainer/preferences/dpo.py` and the others) is the loss of a pair of answers, or of one
answer. The answers are those of a dataset, or for online DPO the policy's own.

The loss is a mean over all pairs (for KTO: answers) of the optimizer step, and not per micro-batch. The
reference policy is the base model without the trained tensors. Its log-probabilities are computed in
the same pass, without a gradient, so there is no second model. With full tuning it is the base model's
own weights, of which the trained ones are a copy. Log-probabilities are summed in float64.

Shape suffixes: M the learned tokens of a micro-batch, A its answers, U its pairs or answers
(`trainer/preferences/objective.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from schemas.learner import Preference, StepBatch
from trainer.model.chat_template import Chat
from trainer.objective.kl import k3
from trainer.objective.metrics import Means, rollout_metrics
from trainer.optimizer import Optimizers, StepSize
from trainer.policy import Policy
from trainer.preferences.batch import PreferenceBatch, PreferenceMicroBatch, encode, micro_batches
from trainer.preferences.objective import AnswerScores, PreferenceObjective, PreferenceSettings
from trainer.preferences.online_dpo import pairs_of


@dataclass(frozen=True, slots=True)
class PreferenceRun:
    """The parts of a run that stay the same over its steps."""

    objective: PreferenceObjective
    settings: PreferenceSettings
    chat: Chat
    max_tokens: int
    micro_batch_tokens: int
    temperature: float = 1.0


def step(
    policy: Policy,
    optimizers: Optimizers,
    given: StepBatch,
    run: PreferenceRun,
    *,
    step_size: StepSize,
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Train the policy on one batch of preferences, in place. Returns the metrics of the step by key,
    and its micro-batch plan: the number of tokens of each micro-batch, in order. Raises Refused for a
    row without the answers that the objective compares."""
    # 1. Encode each prompt with its answers, and mark the tokens of the answers. Online: take the best
    # and the worst sample of each group.
    if run.objective.from_groups:
        batch = pairs_of(given.groups).with_masks(policy)
    else:
        batch = encode(given.preferences, run.objective, chat=run.chat, max_tokens=run.max_tokens)

    # 2. For KTO: measure how far the policy has moved from the reference.
    baseline = measure_baseline(policy, batch, run)

    # 3. Forward and backward, one micro-batch of whole pairs after the other.
    means, plan = Means(), []
    for micro in micro_batches(policy, batch.units, micro_batch_tokens=run.micro_batch_tokens):
        loss = micro_batch_loss(policy, micro, batch, run, baseline=baseline, means=means)
        loss.backward()
        plan.append(micro.packed.num_tokens)

    # 4. Clip the gradients and take an optimizer step at the learning rate of this training step.
    metrics = means.values()
    metrics |= optimizers.update(step_size, loss=metrics.get("train/loss", 0.0))

    # 5. Report how the policy compares the answers, and what was cut.
    if run.objective.has_baseline:
        metrics["train/kl"] = baseline
    metrics |= with_margin(metrics) | batch.metrics() | rollout_metrics(given.groups)
    return metrics, tuple(plan)


def micro_batch_loss(
    policy: Policy,
    micro: PreferenceMicroBatch,
    batch: PreferenceBatch,
    run: PreferenceRun,
    *,
    baseline: float,
    means: Means,
) -> torch.Tensor:
    """The share of the step's loss that this micro-batch contributes, a scalar with a gradient. Its
    metrics are added to `means`."""
    if run.objective.has_head:
        scores = score_by_head(policy, micro)
    else:
        scores = score_by_logprobs(policy, micro, run, means, baseline=baseline)
    loss_U, reward_A = run.objective.loss(scores, run.settings)
    loss = loss_U.sum() / batch.num_losses
    means.add_sum("train/loss", loss)
    _add_comparison(means, micro, scores, reward_A.detach())
    return loss


def score_by_logprobs(
    policy: Policy,
    micro: PreferenceMicroBatch,
    run: PreferenceRun,
    means: Means,
    *,
    baseline: float,
) -> AnswerScores:
    """The log-probabilities of the answers under the policy and the reference. The entropy of the
    policy, and how far it is from the sampler, are added to `means`."""
    # The reference first: it keeps nothing for a backward pass.
    answers, num_answers = micro.answers, micro.answers.num_rows
    reference_A = torch.zeros(num_answers, dtype=torch.float64, device=policy.device)
    if run.objective.has_reference:
        reference_A = reference_logprobs(policy, micro, temperature=run.temperature)
    logprob_M, entropy_M = policy.logprobs(micro.packed, temperature=run.temperature)
    logprob_A = answers.total(logprob_M.double())

    scores = AnswerScores(
        logprob_A,
        reference_A,
        answers.total(torch.ones_like(logprob_M, dtype=torch.float64)),
        torch.tensor(micro.is_chosen, device=logprob_A.device),
        baseline,
    )
    means.add("train/entropy_loss", entropy_M)
    if run.objective.from_groups:
        difference_M = micro.packed.behaviour_M.to(logprob_M.dtype) - logprob_M.detach()
        means.add("train/sampler_kl", k3(difference_M))
        means.add("train/sampler_mismatch", difference_M.abs())
    return scores


def score_by_head(policy: Policy, micro: PreferenceMicroBatch) -> AnswerScores:
    """The rewards of the answers by the policy's score head."""
    score_A = policy.scores(micro.packed).double()
    zero_A = torch.zeros_like(score_A.detach())
    return AnswerScores(
        zero_A,
        zero_A,
        zero_A,
        torch.tensor(micro.is_chosen, device=score_A.device),
        score_A=score_A,
        margin_U=torch.tensor(micro.margins, dtype=torch.float64, device=score_A.device),
    )


@torch.no_grad()
def reference_logprobs(
    policy: Policy, micro: PreferenceMicroBatch, *, temperature: float
) -> torch.Tensor:
    """(A): the sum of the log-probabilities of each answer's tokens under the reference."""
    logprob_M, _ = policy.logprobs(micro.packed, temperature=temperature, reference=True)
    return micro.answers.total(logprob_M.double())


@torch.no_grad()
def measure_baseline(policy: Policy, batch: PreferenceBatch, run: PreferenceRun) -> float:
    """KTO's z: the mean log-ratio of the policy to the reference over the batch's prompts with answers
    of other rows, and 0 where it is negative. 0 for objectives without a baseline."""
    ratios: list[float] = []
    for micro in micro_batches(policy, batch.mismatched, micro_batch_tokens=run.micro_batch_tokens):
        logprob_M, _ = policy.logprobs(micro.packed, temperature=run.temperature)
        logprob_A = micro.answers.total(logprob_M.double())
        reference_A = reference_logprobs(policy, micro, temperature=run.temperature)
        ratios += (logprob_A - reference_A).tolist()
    return max(0.0, math.fsum(ratios) / len(ratios)) if ratios else 0.0


def _add_comparison(
    means: Means, micro: PreferenceMicroBatch, scores: AnswerScores, reward_A: torch.Tensor
) -> None:
    """Add how the policy rates chosen and rejected answers, and the share of pairs in which it rates
    the chosen one higher."""
    kinds = (("chosen", scores.is_chosen_A), ("rejected", ~scores.is_chosen_A))
    for kind, is_kind_A in kinds:
        if is_kind_A.any():
            means.add(f"rewards/{kind}", reward_A[is_kind_A])
            if scores.score_A is None:
                means.add(f"logps/{kind}", scores.logprob_A.detach()[is_kind_A])
    if micro.firsts:
        first = torch.tensor(micro.firsts, device=reward_A.device)
        means.add("rewards/accuracies", reward_A[first] > reward_A[first + 1])


def with_margin(metrics: dict[str, float]) -> dict[str, float]:
    """The difference between the mean rewards of chosen and rejected answers, if there are both."""
    if not {"rewards/chosen", "rewards/rejected"} <= metrics.keys():
        return {}
    return {"rewards/margins": metrics["rewards/chosen"] - metrics["rewards/rejected"]}


@torch.no_grad()
def evaluate(
    policy: Policy, preferences: Sequence[Preference], run: PreferenceRun
) -> dict[str, float]:
    """How the policy compares held-out answers, by metric key: the loss, the margin of the rewards, and
    where there are pairs the share in which it rates the chosen answer higher. Computes no gradient and
    changes nothing. Raises Refused for a row without the answers that the objective compares."""
    batch = encode(preferences, run.objective, chat=run.chat, max_tokens=run.max_tokens)
    if not batch.units:
        return {}
    baseline, means = measure_baseline(policy, batch, run), Means()
    for micro in micro_batches(policy, batch.units, micro_batch_tokens=run.micro_batch_tokens):
        micro_batch_loss(policy, micro, batch, run, baseline=baseline, means=means)
    found = means.values()
    found |= with_margin(found)
    shown = {
        "eval/validation/loss": "train/loss",
        "eval/validation/accuracy": "rewards/accuracies",
        "eval/validation/margin": "rewards/margins",
    }
    return {name: found[key] for name, key in shown.items() if key in found}
