"""GRPO: group relative policy optimization (DeepSeekMath, arXiv 2402.03300).

    A_i    = (R_i - mean_G R) / (std_G R + eps)                     per group of G samples
    r_t    = exp(log pi_theta(t) - log mu(t))                       per action t
    loss   = - sum_t w_t min(r_t A_i, clip(r_t, 1 - low, 1 + high) A_i)  +  beta sum_t w_t k3_t
    k3_t   = exp(d) - d - 1,   d = log pi_ref(t) - log pi_theta(t)

This file is one training step, from rewards to updated weights. Read it from `step` downwards, or set
a breakpoint in it: the learner calls `step` for every algorithm that learns from rewards. An
`Objective` names the two functions in which the algorithms differ. GRPO's are `advantages` and `loss`
at the end of this file. Those of the other algorithms are in `trainer/algorithms/`.

Where the reference implementations of GRPO differ, we decided:
- The ratio is taken against mu, the policy that sampled, with the logprobs recorded at that moment.
  `advanced.correction` takes it against the proximal policy instead (`trainer/objective/correction.py`).
- std has ddof = 1 and eps = 1e-6 (verl's value; TRL uses 1e-4). A group whose rewards are all equal
  gets exactly 0. So does a group with a single reward, because it has no std (verl: the reward itself).
- A reward that is None or not finite is left out of the baseline, and its sample gets advantage 0. It
  is never turned into a reward of 0, which would be a statement about the sample.
- Aggregation is global over the optimizer update (`trainer/objective/aggregate.py`): w_t is
  1 / (S len_i), where S counts the samples that have actions (TRL and Liger count the others too).
- The temperature divides the logits here as it did when sampling.
- Clipping is 0.2 on both sides and beta is 0 unless the run sets them. The reference policy is the
  base model without the trained tensors. Log-ratios are clamped to +-20 before exp.

Shape suffixes: E all actions of the step, M the actions of one micro-batch, S samples
(`trainer/objective/objective.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from schemas.learner import GradedGroup, SamplesRefuted
from trainer.forward.packing import MicroBatch
from trainer.objective.agents import with_agents
from trainer.objective.aggregate import masked_samples, token_weights
from trainer.objective.attestation import Witness
from trainer.objective.batch import (
    PreparedBatch,
    examples_of,
    idle_samples,
    measure_before_update,
    minibatches_of,
    parts_of,
    request_of_each_action,
    sample_of_each_action,
    select_actions,
    with_masks,
)
from trainer.objective.correction import apply_off_policy_correction
from trainer.objective.dual_clip import dual_clipped_ratio
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.kl import MAX_LOG_RATIO, k3, kl_to_reference
from trainer.objective.metrics import Means, mean_over_updates, rollout_metrics
from trainer.objective.objective import (
    Actions,
    ActionValues,
    BatchBeforeUpdate,
    Objective,
    by_group,
    finite_or_none,
)
from trainer.objective.overlong import with_length_penalty
from trainer.objective.sequences import Rows
from trainer.objective.turns import with_turn_rewards
from trainer.objective.value_loss import critic_loss
from trainer.optimizer import Optimizers, StepSize
from trainer.policy import Policy

EPS = 1e-6


def step(
    policy: Policy,
    optimizers: Optimizers,
    groups: Sequence[GradedGroup],
    *,
    objective: Objective,
    hyperparameters: Hyperparameters,
    step_size: StepSize,
    witness: Witness | None = None,
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Train the policy on one batch of graded groups, in place. Each pass over the batch takes one
    update for every mini-batch (`trainer/objective/batch.py`). A `witness` sees the forward pass before
    the first update, and raises SamplesRefuted if the policy did not sample the batch.

    Returns the metrics of the step by key, and its micro-batch plan: the number of tokens of each
    micro-batch of a pass, in order. With several updates, each metric is the mean over them. If the loss
    or a gradient of any of them is not finite, the step changes nothing, and `train/skipped` is above 0.
    """
    # 1. Turn rewards into advantages and token weights. They stay the same for all updates.
    batch = prepare_batch(policy, groups, objective=objective, hyperparameters=hyperparameters)
    batch = replace(batch, witness=witness)

    minibatches = batch.split()
    schedule = minibatches * hyperparameters.updates
    updates: list[dict[str, float]] = []
    plan: tuple[int, ...] = ()
    before = optimizers.snapshot() if len(schedule) > 1 else None
    attested: dict[str, float] = {}
    for minibatch in schedule:
        # 2. Forward and backward, one micro-batch after the other.
        metrics, computed = accumulate_gradients(policy, minibatch)
        plan += computed if len(updates) < len(minibatches) else ()

        if witness is not None and not updates:
            attested = attest(witness, optimizers)

        # 3. Clip the gradients and take an optimizer step at the learning rate of this training step.
        metrics |= optimizers.update(step_size, loss=metrics.get("train/loss", 0.0))
        updates.append(metrics)

        # A loss or gradients that are not finite change nothing, so the updates before are undone, and
        # another one would compute them again.
        if metrics["train/skipped"]:
            if before is not None:
                optimizers.restore(before)
            break

    # 4. Report the mean over the updates, and the lengths of the samples.
    return mean_over_updates(updates) | rollout_metrics(groups) | attested, plan


def prepare_batch(
    policy: Policy,
    groups: Sequence[GradedGroup],
    *,
    objective: Objective,
    hyperparameters: Hyperparameters,
) -> PreparedBatch:
    """Compute what stays constant over the updates of a step: the advantage and the weight of each
    action, and with a critic its return. Values have shape (E) and are float64, on the CPU."""
    examples = with_masks(examples_of(groups), policy)
    minibatches = minibatches_of(groups, examples, most=hyperparameters.minibatch_groups)
    sample_E = sample_of_each_action(examples)

    # Rewards, minus the penalty for overlong answers. A reward that is not finite counts as missing.
    rewards = [finite_or_none(reward) for group in groups for reward in group.rewards]
    reward_S = with_length_penalty(rewards, examples, hyperparameters)

    # What must be measured with the policy before the update: critic values, log pi_prox, and a KL in
    # the reward. It takes one more forward pass, which is left out if the run needs none of them.
    measured = measure_before_update(policy, minibatches, objective, hyperparameters)

    # Rewards -> advantages (for GRPO: `advantages` below), and with a critic also returns.
    before = BatchBeforeUpdate(
        group_S=[n for n, group in enumerate(groups) for _ in group.samples],
        reward_S=reward_S,
        sample_E=sample_E,
        penalty_E=hyperparameters.kl_coef * measured["kl"] if "kl" in measured else None,
        value_E=measured.get("value"),
        parts=parts_of(groups),
        request_E=request_of_each_action(groups),
    )
    estimate = objective.estimate(with_agents(before, groups, hyperparameters), hyperparameters)

    # The weight of each action in the loss. It holds every division, so the loss is a plain sum.
    masked = masked_samples(groups, hyperparameters)
    weight_S: dict[int, float] = {}
    for rows in minibatches:
        weight_S |= token_weights(rows, hyperparameters, masked=masked)
    weights = [weight_S[sample] for sample in sample_E.tolist()]

    advantage_E = with_turn_rewards(estimate.advantage_E, groups, hyperparameters, advantages)
    values: ActionValues = measured | {
        "weight": torch.tensor(weights, dtype=torch.float64),
        "advantage": advantage_E,
    }
    if estimate.return_E is not None:
        values |= {"return": estimate.return_E, "known": before.known_E.double()}

    # Some objectives treat a few actions differently, chosen among all actions of the step.
    values |= select_actions(objective, hyperparameters, values, examples, before.known_E)

    # A group whose rewards are all equal teaches nothing. Its actions are measured, and not trained.
    idle = idle_samples(groups, minibatches, objective, hyperparameters, values)
    return PreparedBatch(objective, hyperparameters, minibatches, values, idle)


def accumulate_gradients(
    policy: Policy, batch: PreparedBatch
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Add the gradient of the batch's loss to the trained tensors. Returns the metrics by key, and the
    micro-batch plan (tokens per micro-batch). The token weights are global over the update, so the
    losses of the micro-batches add up to its loss, however the batch is packed."""
    means, plan = Means(), []
    for micro, values in batch.micro_batches(policy):
        with torch.set_grad_enabled(micro.has_gradient):
            loss = micro_batch_loss(
                policy,
                micro,
                values,
                batch.objective,
                batch.hyperparameters,
                means,
                batch.witness,
            )
        if loss.requires_grad:
            loss.backward()
        plan.append(micro.num_tokens)
    return means.values(), tuple(plan)


def attest(witness: Witness, optimizers: Optimizers) -> dict[str, float]:
    """The metrics of a witness. Raises SamplesRefuted, without any gradients left, if the policy did not
    sample the batch (`trainer/objective/attestation.py`)."""
    try:
        return witness.judge()
    except SamplesRefuted:
        optimizers.clear_gradients()
        raise


def micro_batch_loss(
    policy: Policy,
    micro: MicroBatch,
    values: ActionValues,
    objective: Objective,
    hyperparameters: Hyperparameters,
    means: Means,
    witness: Witness | None = None,
) -> torch.Tensor:
    """The share of the update's loss that this micro-batch contributes, a scalar with a gradient.
    `values` holds the constants of its actions, (M) each. Its metrics are added to `means`."""
    # Logprob of each action under pi_theta, the policy being trained. It alone carries a gradient.
    value_M, temperature = None, hyperparameters.temperature
    trained = {"trains_entropy": hyperparameters.entropy_coef > 0}
    if objective.has_critic:
        logprob_M, entropy_M, value_M = policy.logprobs_and_values(
            micro, temperature=temperature, **trained
        )
    else:
        logprob_M, entropy_M = policy.logprobs(micro, temperature=temperature, **trained)
    if witness is not None:
        witness.see(micro, logprob_M, entropy_M)
    fixed = {name: values_M.to(logprob_M) for name, values_M in values.items()}

    # The ratio pi_theta / mu. With a correction it is pi_theta / pi_prox, the policy before the step.
    behaviour_M = micro.behaviour_M.to(logprob_M.dtype)
    proximal_M = fixed.get("proximal", logprob_M.detach())
    against_M = behaviour_M if hyperparameters.correction == "ratio" else proximal_M
    actions = Actions(
        logprob_M,
        logprob_M - against_M,
        fixed["advantage"],
        Rows(micro.row_M, micro.num_rows),
        selected_M=fixed.get("selected"),
    )

    # The clipped surrogate (for GRPO: `loss` below), and the correction for off-policy samples.
    loss_M, clipped_M = objective.loss(actions, hyperparameters)
    loss_M = apply_off_policy_correction(
        loss_M, actions, behaviour_M, proximal_M, hyperparameters, means
    )

    # The KL to the reference, the entropy bonus and the loss of the critic, if the run has them.
    sampler_kl_M = k3((behaviour_M - logprob_M).detach())
    kl_M = fixed.get("kl", sampler_kl_M)
    if hyperparameters.kl_coef and hyperparameters.kl_in == "loss":
        kl_M = kl_to_reference(policy, micro, logprob_M, hyperparameters)
        loss_M = loss_M + hyperparameters.kl_coef * kl_M
    if hyperparameters.entropy_coef:
        loss_M = loss_M - hyperparameters.entropy_coef * entropy_M
    if value_M is not None:
        loss_M = loss_M + critic_loss(value_M, fixed, hyperparameters, means)

    # The weights contain every division, so the weighted sum is this micro-batch's share of the loss.
    loss = (fixed["weight"] * loss_M).sum()
    means.add_sum("train/loss", loss)
    means.add("train/kl", kl_M.detach())
    means.add("train/clip_ratio", clipped_M)
    means.add("train/entropy_loss", entropy_M.detach())
    means.add("train/sampler_kl", sampler_kl_M)
    means.add("train/sampler_mismatch", (logprob_M - behaviour_M).detach().abs())
    return loss


def advantages(rewards: Sequence[float | None]) -> list[float]:
    """The advantage of each sample of one group, in the order of `rewards`. It is exactly 0 for all
    samples if their rewards are equal, and for each sample without a finite reward."""
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
    """The clipped surrogate loss (M) of each action, and whether it is clipped (M, bool). A clipped
    action has no gradient. `delta` bounds the ratio where the advantage is negative
    (`trainer/objective/dual_clip.py`)."""
    ratio_M = log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free_M = dual_clipped_ratio(ratio_M, delta) * advantage_M
    bound_M = ratio_M.clamp(1 - low, 1 + high) * advantage_M
    return -torch.minimum(free_M, bound_M), bound_M < free_M


def loss(actions: Actions, hyperparameters: Hyperparameters) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss (M) of each action, and whether it is clipped (M, bool)."""
    return clipped_loss(
        actions.log_ratio_M,
        actions.advantage_M,
        low=hyperparameters.clip_low,
        high=hyperparameters.clip_high,
        delta=hyperparameters.clip_delta,
    )


OBJECTIVE = Objective(estimate=by_group(advantages), loss=loss, defaults=Hyperparameters())
