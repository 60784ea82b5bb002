# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""One step of any objective: a batch of graded groups -> gradients on the policy's tensors.

1. `prepare`: rewards become advantages, actions get weights. What needs the policy as it is before
   the update (a critic's values, a KL in the reward, pi_prox of several updates) takes one forward
   pass over the batch, the survey. All of it is constant from then on.
2. `accumulate`, once per update: micro-batch by micro-batch, loss and gradient; the weights are
   global, so the sum over the micro-batches is the loss of the step.

The optimizer is the learner's. Micro-batches are packed anew for each pass, so that memory grows
with a micro-batch and not with the batch; the plan is a function of the rows alone.

Legend: see `trainer/objective/objective.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from schemas.learner import GradedGroup
from trainer.forward.packing import Example, MicroBatch, pack
from trainer.objective.aggregate import token_weights
from trainer.objective.correction import importance
from trainer.objective.hyperparameters import Settings
from trainer.objective.kl import divergence, k3
from trainer.objective.metrics import Means
from trainer.objective.objective import Actions, Objective, Outcome, usable
from trainer.objective.overlong import shaped
from trainer.objective.sequence_mask import keep
from trainer.objective.sequences import Rows
from trainer.objective.value_loss import value_loss
from trainer.policy import Policy

Constants = dict[str, torch.Tensor]
"""What is known of each action before the update, by name, each (E) or a slice of it (M):
weight, advantage; and where they are used proximal (log pi_prox), kl, and with a critic value (V
before the step), return and known (1 where the sample has a reward)."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A batch, ready to train any number of times."""

    objective: Objective
    settings: Settings
    examples: tuple[Example, ...]
    constants_E: Constants

    def micros(self, policy: Policy) -> Iterator[tuple[MicroBatch, Constants]]:
        """The micro-batches in order, each with its slice of the constants."""
        first = 0
        for micro in _micros(policy, self.examples, self.settings):
            here = slice(first, first + len(micro.sample_M))
            yield micro, {name: values_E[here] for name, values_E in self.constants_E.items()}
            first = here.stop


def prepare(
    policy: Policy, groups: Sequence[GradedGroup], objective: Objective, settings: Settings
) -> Batch:
    """Rewards -> advantages and weights, for all actions of a step."""
    samples = [sample for group in groups for sample in group.samples]
    examples = tuple(
        Example(i, row) for i, sample in enumerate(samples) for row in sample.sequences
    )
    sample_E = torch.tensor([e.sample for e in examples for _ in range(e.num_actions)])
    before = _survey(policy, examples, objective, settings)
    outcome = Outcome(
        group_S=[n for n, group in enumerate(groups) for _ in group.samples],
        reward_S=shaped([usable(r) for group in groups for r in group.rewards], examples, settings),
        sample_E=sample_E.long(),
        penalty_E=settings.kl_coef * before["kl"] if "kl" in before else None,
        value_E=before.get("value"),
    )
    weight_S = token_weights(examples, settings)
    weights = [weight_S[sample] for sample in sample_E.tolist()]
    estimate = objective.estimate(outcome, settings)
    constants = {
        "weight": torch.tensor(weights, dtype=torch.float64),
        "advantage": estimate.advantage_E,
    }
    if estimate.return_E is not None:
        constants |= {"return": estimate.return_E, "known": outcome.known_E.double()}
    return Batch(objective, settings, examples, before | constants)


def accumulate(policy: Policy, batch: Batch) -> tuple[dict[str, float], tuple[int, ...]]:
    """Add the gradient of the batch's loss to the policy's tensors. Returns metrics and the
    micro-batch plan."""
    means, plan = Means(), []
    for micro, constants in batch.micros(policy):
        loss = micro_loss(policy, micro, constants, batch.objective, batch.settings, means)
        if loss.requires_grad:
            loss.backward()
        plan.append(micro.num_tokens)
    return means.values(), tuple(plan)


def micro_loss(
    policy: Policy,
    micro: MicroBatch,
    constants: Constants,
    objective: Objective,
    settings: Settings,
    means: Means,
) -> torch.Tensor:
    """This micro-batch's share of the step's loss."""
    value_M = None
    if objective.has_critic:
        logprob_M, entropy_M, value_M = policy.judged(micro, temperature=settings.temperature)
    else:
        logprob_M, entropy_M = policy.logprobs(micro, temperature=settings.temperature)
    fixed = {name: values_M.to(logprob_M) for name, values_M in constants.items()}
    behaviour_M = micro.behaviour_M.to(logprob_M.dtype)
    proximal_M = fixed.get("proximal", logprob_M.detach())
    against_M = behaviour_M if settings.correction == "ratio" else proximal_M
    actions = Actions(
        logprob_M, logprob_M - against_M, fixed["advantage"], Rows(micro.row_M, micro.num_rows)
    )
    drift_M = k3((behaviour_M - logprob_M).detach())
    loss_M, clipped_M = objective.loss(actions, settings)
    loss_M = _trusted(loss_M, actions, behaviour_M, proximal_M, settings, means)
    if settings.kl_coef and settings.kl_in == "loss":
        kl_M = _divergence(policy, micro, logprob_M, settings)
        loss_M = loss_M + settings.kl_coef * kl_M
    else:
        kl_M = fixed.get("kl", drift_M)
    if value_M is not None:
        loss_M = loss_M + settings.value_coef * _value_loss(value_M, fixed, settings, means)
    loss = (fixed["weight"] * loss_M).sum()
    means.add_sum("train/loss", loss)
    means.add("train/kl", kl_M.detach())
    means.add("train/clip_ratio", clipped_M)
    means.add("train/entropy_loss", entropy_M)
    means.add("train/sampler_kl", drift_M)
    means.add("train/sampler_mismatch", (logprob_M - behaviour_M).detach().abs())
    return loss


def _trusted(
    loss_M: torch.Tensor,
    actions: Actions,
    behaviour_M: torch.Tensor,
    proximal_M: torch.Tensor,
    settings: Settings,
    means: Means,
) -> torch.Tensor:
    """The surrogate, less what is too far off-policy, times what the way from mu to pi_prox weighs."""
    if settings.off_policy_threshold is not None:
        keep_M = keep(
            behaviour_M,
            actions.logprob_M,
            actions.advantage_M,
            actions.rows,
            threshold=settings.off_policy_threshold,
        )
        means.add("train/off_policy_ratio", ~keep_M)
        loss_M = loss_M * keep_M
    if settings.correction != "ratio":
        weight_M, touched_M = importance(proximal_M - behaviour_M, actions.rows, settings)
        means.add("train/importance_weight", weight_M)
        means.add("train/corrected_ratio", touched_M)
        loss_M = loss_M * weight_M
    return loss_M


def _value_loss(
    value_M: torch.Tensor, fixed: Constants, settings: Settings, means: Means
) -> torch.Tensor:
    """The critic's loss at each action; 0 where the sample has no reward to learn from."""
    loss_M, clipped_M = value_loss(
        value_M, fixed["value"], fixed["return"], clip=settings.value_clip
    )
    loss_M = loss_M * fixed["known"]
    means.add_sum("train/value_loss", (fixed["weight"] * loss_M).sum())
    means.add("train/value_clip_ratio", clipped_M)
    means.add("train/value", value_M.detach())
    return loss_M


def _divergence(
    policy: Policy, micro: MicroBatch, logprob_M: torch.Tensor, settings: Settings
) -> torch.Tensor:
    """The estimate of KL(pi || base) at each action."""
    with torch.no_grad():
        reference_M, _ = policy.logprobs(micro, temperature=settings.temperature, reference=True)
    return divergence(settings.kl_estimator, reference_M - logprob_M)


@torch.no_grad()
def _survey(
    policy: Policy, examples: Sequence[Example], objective: Objective, settings: Settings
) -> Constants:
    """What must be known of the policy before the update: nothing, unless something asks."""
    penalised = settings.kl_coef != 0.0 and settings.kl_in == "reward"
    anchored = settings.updates > 1 and settings.correction != "ratio"
    asked = {"proximal": True, "kl": penalised, "value": objective.has_critic}
    if not (penalised or anchored or objective.has_critic):
        return {}
    found: dict[str, list[torch.Tensor]] = {
        name: [] for name, is_asked in asked.items() if is_asked
    }
    for micro in _micros(policy, examples, settings):
        if objective.has_critic:
            logprob_M, _, value_M = policy.judged(micro, temperature=settings.temperature)
            found["value"].append(value_M)
        else:
            logprob_M, _ = policy.logprobs(micro, temperature=settings.temperature)
        found["proximal"].append(logprob_M)
        if penalised:
            found["kl"].append(_divergence(policy, micro, logprob_M, settings))
    nothing = torch.zeros(0, dtype=torch.float64)
    return {
        name: torch.cat([nothing, *(p.double().cpu() for p in parts)])
        for name, parts in found.items()
    }


def _micros(
    policy: Policy, examples: Sequence[Example], settings: Settings
) -> Iterator[MicroBatch]:
    return pack(
        examples,
        micro_batch_tokens=settings.micro_batch_tokens,
        splits=settings.splits_groups,
        share=policy.shares_prompts,
        device=policy.device,
    )
