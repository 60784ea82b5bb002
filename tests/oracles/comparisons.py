"""The comparisons: each objective's loss of a case, by our trainer and by every oracle that has the
objective.

Our loss goes through the whole step: groups, packing, micro-batches, weights. Where a reference divides
by something else, the factor is written out next to it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import assume

from schemas.config import Correction, CorrectionLevel, Divergence, LossAggregation
from tests.oracles import theirs_liger, theirs_trl, theirs_verl
from tests.oracles.cases import Answer, Case, answer, our_answer, times
from tests.unit.trainer.support import job
from trainer.algorithms import dr_grpo, ppo
from trainer.algorithms.dppo import divergence
from trainer.algorithms.registry import OBJECTIVES, hyperparameters_of
from trainer.objective.covariance import MeasuredActions, covariances
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import BatchBeforeUpdate, Objective, finite_or_none

Compared = tuple[Answer, dict[str, Answer]]
"""Our answer, and theirs by the name of the oracle."""

LONGEST = 7
LOW, HIGH = 0.5, 2.0
"""Where corrections cut off."""


def advantage_of(case: Case, objective: Objective) -> torch.Tensor:
    """Our advantages (B), for references that take advantages, which have tests of their own."""
    rewards = [finite_or_none(reward) for reward in case.rewards]
    before = BatchBeforeUpdate(case.group, rewards, torch.arange(case.num_rows))
    return objective.estimate(before, objective.defaults).advantage_E


def advantage_of_live_rows(case: Case, objective: Objective) -> torch.Tensor:
    """These advantages (B), and 0 for a row without actions, whose geometric mean others take for 1."""
    return advantage_of(case, objective) * (case.mask.sum(-1) > 0)


def hyperparameters_for(name: Any, **changes: Any) -> tuple[Objective, Hyperparameters]:
    objective = OBJECTIVES[name]
    hyperparameters = replace(objective.defaults, max_response_length=LONGEST)
    return objective, replace(hyperparameters, **changes)


def clips(hyperparameters: Hyperparameters) -> dict[str, Any]:
    return {
        "clip_ratio_low": hyperparameters.clip_low,
        "clip_ratio_high": hyperparameters.clip_high,
    }


def epsilons(hyperparameters: Hyperparameters) -> dict[str, float]:
    return {"epsilon_low": hyperparameters.clip_low, "epsilon_high": hyperparameters.clip_high}


def away_from(value: torch.Tensor, *edges: float) -> None:
    """Each implementation adds up a row in another order. Where values are cut off, the sums may
    fall on different sides of the edge, and there the gradient jumps."""
    assume(all(bool(((value - edge).abs() > 1e-9).all()) for edge in edges))


def row_sum(case: Case, value: torch.Tensor) -> torch.Tensor:
    return (value * case.mask).sum(-1, keepdim=True)


def row_mean(case: Case, value: torch.Tensor) -> torch.Tensor:
    return row_sum(case, value) / case.mask.sum(-1, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class Reference:
    """How a reference is called for an aggregation, and the factor that its answer is multiplied
    by."""

    loss_type: str
    factor: Callable[[Case], float]


AGGREGATIONS: dict[LossAggregation, Reference] = {
    "sequence_mean": Reference("grpo", lambda case: case.row_factor),
    "token_mean": Reference("dapo", lambda case: 1.0),
    "constant": Reference("dr_grpo", lambda case: case.row_factor),
}


def surrogate(name: str, **changes: Any) -> Callable[[Case], Compared]:
    """A clipped surrogate, by all three oracles."""
    objective, hyperparameters = hyperparameters_for(name, **changes)
    asked, is_gspo = AGGREGATIONS[hyperparameters.aggregation], name == "gspo"
    options: dict[str, Any] = {
        "loss_type": asked.loss_type,
        "max_completion_length": LONGEST,
        "importance_sampling_level": "sequence" if is_gspo else "token",
        "delta": hyperparameters.clip_delta,
        **epsilons(hyperparameters),
    }
    dual: dict[str, Any] = (
        {} if hyperparameters.clip_delta is None else {"clip_ratio_c": hyperparameters.clip_delta}
    )

    def compare(case: Case) -> Compared:
        if is_gspo:
            edges = (
                1 - hyperparameters.clip_low,
                1 + hyperparameters.clip_high,
                hyperparameters.clip_delta or 0.0,
            )
            away_from(row_mean(case, case.now - case.behaviour).exp(), *edges)
        advantage, factor = advantage_of(case, objective), asked.factor(case)
        found = {
            "TRL": times(theirs_trl.loss(case, advantage, **options), factor),
            "Liger": times(theirs_liger.loss(case, advantage, **options), factor),
        }
        if not (is_gspo and dual):  # verl's GSPO has no such bound
            found["verl"] = theirs_verl.policy_loss(
                case,
                "gspo" if is_gspo else "vanilla",
                advantage,
                aggregation=hyperparameters.aggregation,
                longest=LONGEST,
                **clips(hyperparameters),
                **dual,
            )
        return our_answer(case, objective, hyperparameters), found

    return compare


def cispo(case: Case) -> Compared:
    """TRL and Liger take the bound itself; verl bounds from below too, at a value that no ratio
    reaches."""
    objective, hyperparameters = hyperparameters_for("cispo")
    advantage = advantage_of(case, objective)
    bound: dict[str, Any] = {"loss_type": "cispo", "epsilon_high": 1 + hyperparameters.clip_high}
    from_above: dict[str, Any] = {
        "clip_ratio_low": 1.0,
        "clip_ratio_high": hyperparameters.clip_high,
    }
    return our_answer(case, objective, hyperparameters), {
        "TRL": theirs_trl.loss(case, advantage, **bound),
        "Liger": theirs_liger.loss(case, advantage, **bound),
        "verl": theirs_verl.policy_loss(case, "cispo", advantage, **from_above),
    }


def luspo(case: Case) -> Compared:
    """TRL and Liger do not divide by the longest answer."""
    objective, hyperparameters = hyperparameters_for("luspo", clip_low=0.2, clip_high=0.3)
    away_from(row_mean(case, case.now - case.behaviour).exp(), 0.8, 1.3)
    advantage, factor = advantage_of(case, objective), case.row_factor / LONGEST
    options: dict[str, Any] = {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        **epsilons(hyperparameters),
    }
    return our_answer(case, objective, hyperparameters), {
        "TRL": times(theirs_trl.loss(case, advantage, **options), factor),
        "Liger": times(theirs_liger.loss(case, advantage, **options), factor),
        "verl": theirs_verl.policy_loss(
            case,
            "gspo",
            advantage,
            aggregation="constant",
            longest=LONGEST,
            **clips(hyperparameters),
        ),
    }


def gmpo(case: Case) -> Compared:
    """verl's means divide by n + 1e-8, inside of exp, so `test_losses.py` compares it less closely."""
    objective, hyperparameters = hyperparameters_for("gmpo")
    advantage = advantage_of_live_rows(case, objective)
    options: dict[str, Any] = {"kind": theirs_trl.GMPO, **epsilons(hyperparameters)}
    return our_answer(case, objective, hyperparameters), {
        "TRL": times(theirs_trl.loss(case, advantage, **options), case.row_factor)
    }


def sapo(case: Case) -> Compared:
    objective, hyperparameters = hyperparameters_for("sapo")
    advantage, factor = advantage_of(case, objective), case.row_factor
    taus: dict[str, Any] = {"tau_pos": hyperparameters.tau_pos, "tau_neg": hyperparameters.tau_neg}
    return our_answer(case, objective, hyperparameters), {
        "TRL": times(theirs_trl.loss(case, advantage, loss_type="sapo"), factor),
        "Liger": times(theirs_liger.loss(case, advantage, loss_type="sapo"), factor),
        "verl": theirs_verl.policy_loss(
            case, "sapo", advantage, aggregation="sequence_mean", **taus
        ),
    }


def dppo(measure: Divergence) -> Callable[[Case], Compared]:
    """Only verl has it. A log-probability is at most 0 here, because it is taken for a probability."""
    objective, hyperparameters = hyperparameters_for("dppo", divergence=measure, clip_high=0.1)
    bounds: dict[str, Any] = {**clips(hyperparameters), "clip_ratio_c": 20.0}

    def compare(case: Case) -> Compared:
        case = replace(case, behaviour=case.behaviour.clamp(max=-0.01))
        apart = divergence(case.now, case.behaviour, hyperparameters)
        away_from(apart, hyperparameters.clip_low, hyperparameters.clip_high)
        advantage = advantage_of(case, objective)
        return our_answer(case, objective, hyperparameters), {
            "verl": theirs_verl.policy_loss(case, f"dppo_{measure}", advantage, **bounds)
        }

    return compare


def covariance(name: str, **changes: Any) -> Callable[[Case], Compared]:
    """Clip-Cov or KL-Cov, which only verl has, on one micro-batch. verl's policy before the update is
    the one that is trained. Actions without a reward are left out of its mask, and out of its mean."""
    objective, hyperparameters = hyperparameters_for(name, **changes)
    assert objective.select is not None
    select = objective.select

    def compare(case: Case) -> Compared:
        case = rippled(case)
        mask, advantage = theirs_verl.known_mask(case), advantage_of(case, objective)
        assume(bool(mask.any()))
        actions = measured(case, mask, advantage)
        keep_apart(covariances(actions)[actions.counts_E], hyperparameters)
        selected_E = select(actions, hyperparameters)
        bounds = {"clip_cov": clips(hyperparameters), "kl_cov": {}}[name]
        found = theirs_verl.covariance_loss(
            case, name, advantage, mask, hyperparameters, selected=selected_E, **bounds
        )
        share = float(mask.sum() / case.mask.sum())
        return our_answer(case, objective, hyperparameters), {"verl": times(found, share)}

    return compare


def measured(case: Case, mask: torch.Tensor, advantage_B: torch.Tensor) -> MeasuredActions:
    """The actions of a case before the update, those outside of `mask` not counting."""
    is_action = case.mask > 0
    return MeasuredActions(
        logprob_E=case.now[is_action],
        log_ratio_E=(case.now - case.behaviour)[is_action],
        advantage_E=advantage_B[:, None].expand_as(case.now)[is_action],
        counts_E=mask[is_action] > 0,
    )


def rippled(case: Case) -> Case:
    """The case with different log-probabilities, before the update too, because drawn ones are often
    equal. The ratios stay."""
    ripple = torch.arange(case.now.numel()).double().mul(2.4).sin().view_as(case.now) / 10
    now, behaviour = case.now + ripple, case.behaviour + ripple
    return replace(case, now=now, proximal=now, behaviour=behaviour)


def keep_apart(cov: torch.Tensor, hyperparameters: Hyperparameters) -> None:
    """Skip covariances that rounding alone puts on one side of a bound, and steps in which KL-Cov has
    to choose one that is not positive, because verl then takes any."""
    away_from(cov, hyperparameters.cov_low, hyperparameters.cov_high)
    most = max(1, int(hyperparameters.cov_ratio * len(cov)))
    first = cov.sort(descending=True).values
    assume(float(first[most - 1]) > 1e-9)
    away_from(first[most - 1], *first[most : most + 1].tolist())


def gpg(case: Case) -> Compared:
    """Only verl has it. Its alpha is another one (`test_advantages.py`)."""
    objective, hyperparameters = hyperparameters_for("gpg")
    advantage = advantage_of(case, objective)
    return our_answer(case, objective, hyperparameters), {
        "verl": theirs_verl.policy_loss(case, "gpg", advantage)
    }


def importance_sampling(case: Case) -> Compared:
    """TRL and Liger with a clip that no ratio reaches."""
    objective, hyperparameters = hyperparameters_for("importance_sampling")
    advantage = advantage_of(case, dr_grpo.OBJECTIVE)
    options: dict[str, Any] = {
        "epsilon_low": 1.0,
        "epsilon_high": theirs_verl.NEVER,
        "loss_type": "dr_grpo",
        "max_completion_length": LONGEST,
    }
    return our_answer(case, objective, hyperparameters), {
        "TRL": times(theirs_trl.loss(case, advantage, **options), case.row_factor),
        "Liger": times(theirs_liger.loss(case, advantage, **options), case.row_factor),
    }


def sequence_mask(threshold: float) -> Callable[[Case], Compared]:
    """verl has no such mask, so its surrogate is weighted by a mask that is written out here."""

    def compare(case: Case) -> Compared:
        distance = row_mean(case, case.behaviour - case.now)
        away_from(distance, threshold)
        objective, hyperparameters = hyperparameters_for("rloo", aggregation="token_mean")
        hyperparameters = replace(hyperparameters, off_policy_threshold=threshold)
        advantage = advantage_of(case, objective)
        kept = ((advantage[:, None] >= 0) | (distance <= threshold)).double()
        options: dict[str, Any] = {"loss_type": "dapo", "off_policy_mask_threshold": threshold}
        return our_answer(case, objective, hyperparameters), {
            "TRL": theirs_trl.loss(case, advantage, **options),
            "verl": theirs_verl.policy_loss(
                case, "vanilla", advantage, weights=kept.expand_as(case.mask)
            ),
        }

    return compare


def kl_in_the_loss(case: Case) -> Compared:
    objective, hyperparameters = hyperparameters_for("dapo", kl_coef=0.3)
    advantage = advantage_of(case, objective)
    options: dict[str, Any] = {"loss_type": "dapo", "beta": 0.3, **epsilons(hyperparameters)}
    return our_answer(case, objective, hyperparameters), {
        "TRL": theirs_trl.loss(case, advantage, **options),
        "Liger": theirs_liger.loss(case, advantage, **options),
    }


def kl_in_the_reward(case: Case) -> Compared:
    """The penalty of a sample is that of all its actions, under the policy before the update. verl
    computes the rewards and the advantages, and TRL and verl compute their own losses."""
    case = replace(case, mask=torch.ones_like(case.mask))
    objective, hyperparameters = hyperparameters_for("rloo", aggregation="token_mean")
    hyperparameters = replace(hyperparameters, kl_coef=0.2, kl_in="reward", kl_estimator="k1")
    penalised = theirs_verl.CORE.compute_rewards(
        theirs_verl.token_rewards(case), case.proximal, case.reference, 0.2
    )
    net = penalised.sum(-1).tolist()
    rewards = tuple(r if known else None for r, known in zip(net, case.has_reward, strict=True))
    shaped = replace(case, rewards=rewards)
    advantage = theirs_verl.group_advantages(shaped, "rloo_vectorized")
    return our_answer(case, objective, hyperparameters), {
        "TRL": theirs_trl.loss(case, advantage, loss_type="dapo"),
        "verl": theirs_verl.policy_loss(case, "vanilla", advantage),
    }


def decoupled(correction: Correction, level: CorrectionLevel) -> Callable[[Case], Compared]:
    """The decoupled losses: the ratio against pi_prox, weighted by pi_prox / mu. TRL and verl
    compute their own weights where they have the form; Liger is given verl's."""
    objective, hyperparameters = hyperparameters_for("rloo", aggregation="token_mean", updates=2)
    hyperparameters = replace(
        hyperparameters,
        correction=correction,
        correction_level=level,
        correction_low=LOW,
        correction_high=HIGH,
    )

    def compare(case: Case) -> Compared:
        log_weight = case.proximal - case.behaviour
        along = {"token": log_weight, "sequence": row_sum(case, log_weight)}
        value = along.get(level, row_mean(case, log_weight))
        if level != "token":
            away_from(value.exp(), LOW, HIGH)
            assume(bool((value.abs() < 19).all()))
        advantage = advantage_of(case, objective)
        weights = _their_weights(case, hyperparameters, value)
        against: dict[str, Any] = {"against": case.proximal}
        liger: dict[str, Any] = {"loss_type": "dapo", "weights": weights.expand_as(case.mask)}
        found = {
            "verl": theirs_verl.policy_loss(
                case, "vanilla", advantage, weights=weights.expand_as(case.mask), **against
            ),
            "Liger": theirs_liger.loss(case, advantage, **liger, **against),
        }
        if level != "geometric":
            trl = _trl_correction(hyperparameters)
            found["TRL"] = theirs_trl.loss(case, advantage, loss_type="dapo", **trl, **against)
        return our_answer(case, objective, hyperparameters), found

    return compare


def _their_weights(
    case: Case, hyperparameters: Hyperparameters, value: torch.Tensor
) -> torch.Tensor:
    """verl's weights. Where it has none (decoupled, geometric) they are written out, except for the
    mask of geometric means, which verl has."""
    kind, level = hyperparameters.correction, hyperparameters.correction_level
    if kind == "decoupled":
        return value.exp()
    if level != "geometric":
        threshold = HIGH if kind == "truncated" else f"{LOW}_{HIGH}"
        return theirs_verl.correction_weights(case, level=level, threshold=threshold)
    if kind == "truncated":
        return value.exp().clamp(max=HIGH)
    with theirs_verl.exact_means():
        return theirs_verl.rejection_mask(case, low=LOW, high=HIGH) * value.exp()


def _trl_correction(hyperparameters: Hyperparameters) -> dict[str, Any]:
    masked = hyperparameters.correction == "masked"
    bounds = {"decoupled": 1e30}.get(hyperparameters.correction, HIGH)
    return {
        "use_vllm": True,
        "vllm_importance_sampling_mode": f"{hyperparameters.correction_level}_"
        f"{'mask' if masked else 'truncate'}",
        "vllm_importance_sampling_clip_max": bounds,
        "vllm_importance_sampling_clip_min": LOW if masked else None,
    }


def with_all_rewards(case: Case) -> Case:
    """The case with a reward for every row, and enough actions for verl's whitening."""
    rewards = tuple(
        reward if known else 0.3
        for reward, known in zip(case.rewards, case.has_reward, strict=True)
    )
    assume(case.mask.sum() >= 2)
    return replace(case, rewards=rewards)


def reinforce_plus_plus(case: Case) -> Compared:
    """The whole of REINFORCE++, with the KL in the reward."""
    case = with_all_rewards(case)
    objective, hyperparameters = hyperparameters_for(
        "reinforce_plus_plus", kl_coef=0.1, gamma=0.9, updates=2
    )
    penalty = 0.1 * (case.proximal - case.reference)
    with theirs_verl.exact_means():
        rewards = theirs_verl.token_rewards(case, penalty)
        advantages = theirs_verl.returns(case, rewards, gamma=0.9)
    return our_answer(case, objective, hyperparameters), {
        "verl": theirs_verl.policy_loss(case, "vanilla", advantages)
    }


def reinforce_plus_plus_with_a_baseline(case: Case) -> Compared:
    """REINFORCE++ with a group baseline, with a run's defaults: the KL is in the loss, k2, which
    verl computes too; its mean over the actions is written out."""
    case = with_all_rewards(case)
    assume(case.size > 1)
    config = job(algorithm="reinforce_plus_plus", group_baseline=True, kl_coef=0.1).config
    hyperparameters = hyperparameters_of(config, micro_batch_tokens=4096)
    with theirs_verl.exact_means():
        advantages = theirs_verl.baseline(case)
    policy = theirs_verl.policy_loss(case, "vanilla", advantages)

    def divergence_of(now: torch.Tensor) -> torch.Tensor:
        k2 = theirs_verl.CORE.kl_penalty(now, case.reference, "k2")
        return 0.1 * (k2 * case.mask).sum() / case.mask.sum()

    kl = answer(case, divergence_of)
    whole = Answer(policy.loss + kl.loss, policy.gradient + kl.gradient)
    return our_answer(case, OBJECTIVES["reinforce_plus_plus"], hyperparameters), {"verl": whole}


def ppo_with_a_critic(case: Case) -> Compared:
    """The whole of PPO after one update: pi_theta and V have moved away from their measured
    values."""
    case = with_all_rewards(case)
    assert case.value is not None
    away_from(case.value.abs() / 2, 0.2)
    hyperparameters = replace(ppo.OBJECTIVE.defaults, updates=2, value_coef=0.3, kl_coef=0.1)
    penalty, before = 0.1 * (case.proximal - case.reference), case.value / 2
    with theirs_verl.exact_means():
        rewards = theirs_verl.token_rewards(case, penalty)
        advantages, returns = theirs_verl.gae(case, rewards, before, gamma=1.0, lam=0.95)
    policy = theirs_verl.policy_loss(case, "vanilla", advantages)
    leaf = case.value.clone().requires_grad_()
    critic = 0.3 * theirs_verl.value_loss(leaf, before, returns, case.mask, 0.2)
    critic.backward()
    whole = Answer(policy.loss + float(critic.detach()), policy.gradient, leaf.grad)
    return our_answer(case, ppo.OBJECTIVE, hyperparameters), {"verl": whole}


COMPARISONS: dict[str, Callable[[Case], Compared]] = {
    **{
        f"{name}, {aggregation}": surrogate(name, aggregation=aggregation)
        for name in ("grpo", "dr_grpo", "dapo", "gspo", "maxrl", "rloo")
        for aggregation in AGGREGATIONS
    },
    "gspo, wide clip": surrogate("gspo", clip_low=0.2, clip_high=0.2),
    "luspo": luspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo, tv": dppo("tv"),
    "dppo, kl": dppo("kl"),
    "clip_cov": covariance("clip_cov", cov_ratio=0.3, cov_low=0.05),
    "clip_cov, narrow clip": covariance("clip_cov", cov_low=1e-3, clip_low=0.2, clip_high=0.2),
    "kl_cov": covariance("kl_cov", cov_ratio=0.3),
    "kl_cov, one action": covariance("kl_cov", cov_kl_coef=0.5),
    "gpg": gpg,
    "importance_sampling": importance_sampling,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus, group baseline": reinforce_plus_plus_with_a_baseline,
    "ppo": ppo_with_a_critic,
    "two-sided clip at 1.5": surrogate("grpo", clip_delta=1.5),
    "two-sided clip at 4": surrogate("rloo", clip_delta=4.0),
    "two-sided clip of sequences": surrogate("gspo", clip_delta=1.5),
    "sequence mask at 0.05": sequence_mask(0.05),
    "sequence mask at 0.5": sequence_mask(0.5),
    "KL (k3) in the loss": kl_in_the_loss,
    "KL (k1) in the reward": kl_in_the_reward,
    "decoupled": decoupled("decoupled", "token"),
    **{
        f"{correction}, {level}": decoupled(correction, level)
        for correction in ("truncated", "masked")
        for level in ("token", "sequence", "geometric")
    },
}
