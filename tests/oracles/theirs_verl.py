"""verl: its advantage estimators, policy losses, value loss and corrections, in float64."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.available import oracle
from tests.oracles.cases import Answer, Case, answer
from trainer.objective.hyperparameters import Hyperparameters

CORE = oracle("verl.trainer.ppo.core_algos")
CORRECTIONS = oracle("verl.trainer.ppo.rollout_corr_helper")
CONFIG = oracle("verl.workers.config")

NEVER = 1e9
"""A bound that no ratio reaches."""

AGGREGATION = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}


def group_advantages(case: Case, estimator: str, **settings: Any) -> torch.Tensor:
    """Advantages (B) of an estimator that compares the rows of a group. Rows without a reward are
    left out and get 0, because verl has no missing rewards."""
    known = [row for row, is_known in enumerate(case.has_reward) if is_known]
    found = torch.zeros(case.num_rows, dtype=torch.float64)
    if known:
        rewards = torch.tensor([case.rewards[row] for row in known], dtype=torch.float64)
        index = np.array([case.group[row] for row in known])
        advantages, _ = CORE.get_adv_estimator_fn(estimator)(
            rewards[:, None].clone(), torch.ones(len(known), 1).double(), index=index, **settings
        )
        found[known] = advantages[:, 0]
    return found


def decoupled_advantages(
    case: Case, parts: dict[str, list[float]], weights: list[float]
) -> torch.Tensor:
    """GDPO's advantages (B, T), whitened over tokens, in 32 bits. verl puts each part at the last token
    of a row, by the row's length."""
    parts_of_row = {name: np.array(values) for name, values in parts.items()}
    tokens = {
        "prompts": torch.ones(case.num_rows, 1),
        "attention_mask": torch.cat([torch.ones(case.num_rows, 1), case.mask], dim=1).long(),
    }
    found: torch.Tensor = CORE.get_adv_estimator_fn("gdpo")(
        torch.zeros_like(case.mask),
        case.mask,
        index=np.array(case.group),
        config={"gdpo_reward_keys": list(parts), "gdpo_reward_weights": weights},
        non_tensor_batch=parts_of_row,
        batch=tokens,
    )[0]
    return found


def policy_loss(
    case: Case,
    name: str,
    advantage: torch.Tensor,
    *,
    aggregation: str = "token_mean",
    longest: int | None = None,
    against: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    **clips: float,
) -> Answer:
    """The policy loss `name` with advantages (B) or (B, T). verl's mean over a sequence divides by
    its length plus 1e-8; the losses are linear in the advantage, so that is multiplied back."""
    info = {} if longest is None else {"loss_scale_factor": longest}
    config = CONFIG.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        global_batch_info=info,
        **{"clip_ratio_c": NEVER, **clips},
    )
    wide = advantage[:, None].expand_as(case.now) if advantage.dim() == 1 else advantage
    trained = case.mask if mask is None else mask
    if aggregation == "sequence_mean":
        count = trained.sum(-1, keepdim=True)
        wide = wide * (count + 1e-8) / count.clamp(min=1)

    def loss_of(now: torch.Tensor) -> torch.Tensor:
        value, _ = CORE.get_policy_loss_fn(name)(
            old_log_prob=case.behaviour if against is None else against,
            log_prob=now,
            advantages=wide,
            response_mask=trained,
            loss_agg_mode=AGGREGATION[aggregation],
            config=config,
            rollout_is_weights=weights,
        )
        return value

    return answer(case, loss_of)


def covariance_loss(
    case: Case,
    name: str,
    advantage_B: torch.Tensor,
    mask: torch.Tensor,
    hyperparameters: Hyperparameters,
    *,
    selected: torch.Tensor,
    **clips: float,
) -> Answer:
    """Clip-Cov or KL-Cov, a mean over the tokens of `mask`. What verl would draw at random is replaced
    by our draw: of its candidates, those that we selected (E, bool) come first."""
    config = CONFIG.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        **clips,
        policy_loss=CONFIG.PolicyLossConfig(
            loss_mode=name,
            clip_cov_ratio=hyperparameters.cov_ratio,
            clip_cov_lb=hyperparameters.cov_low,
            clip_cov_ub=hyperparameters.cov_high,
            kl_cov_ratio=hyperparameters.cov_ratio,
            ppo_kl_coef=hyperparameters.cov_kl_coef,
        ),
    )
    chosen = torch.zeros_like(case.mask, dtype=torch.bool)
    chosen[case.mask > 0] = selected
    candidates: list[torch.Tensor] = []

    def find(is_candidate: torch.Tensor, **settings: Any) -> Any:
        found = nonzero(is_candidate, **settings)
        if is_candidate.shape == chosen.shape:
            candidates[:] = [chosen[is_candidate]]
        return found

    def loss_of(now: torch.Tensor) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "nonzero", find)
            patch.setattr(torch, "randperm", lambda n: (~candidates[0]).int().argsort(stable=True))
            value, _ = CORE.get_policy_loss_fn(name)(
                old_log_prob=case.behaviour,
                log_prob=now,
                advantages=advantage_B[:, None].expand_as(now),
                response_mask=mask,
                config=config,
            )
        return value

    nonzero = torch.nonzero
    with exact_means():
        return answer(case, loss_of)


def reinforce_loss(case: Case, advantage_B: torch.Tensor, weights: torch.Tensor) -> Answer:
    """-w A log pi, the mean over sequences of the sum over tokens."""
    config = CONFIG.ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)

    def loss_of(now: torch.Tensor) -> torch.Tensor:
        value, _ = CORE.compute_policy_loss_reinforce(
            rollout_log_prob=case.behaviour,
            log_prob=now,
            advantages=advantage_B[:, None].expand_as(now),
            response_mask=case.mask,
            loss_agg_mode="seq-mean-token-sum",
            config=config,
            rollout_is_weights=weights,
        )
        return value

    return answer(case, loss_of)


def correction_weights(case: Case, *, level: str, threshold: str | float) -> torch.Tensor:
    """pi_prox / mu, truncated (a number) or masked ("low_high"). verl's metrics divide by 0 where
    everything is masked, so they are left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CORRECTIONS, "compute_is_metrics", lambda **_: {})
        weights, _ = CORRECTIONS.compute_rollout_correction_weights(
            case.proximal - case.behaviour,
            case.mask,
            rollout_is=level,
            rollout_is_threshold=threshold,
        )
    return weights


@contextlib.contextmanager
def exact_means() -> Iterator[None]:
    """verl divides masked means by n + 1e-8; within this block it divides by n."""
    functional = oracle("verl.utils.torch_functional")

    def mean(values: torch.Tensor, mask: Any, axis: Any = None) -> torch.Tensor:
        total: torch.Tensor = functional.masked_sum(values, mask, axis)
        return total / mask.sum(axis=axis)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "masked_mean", mean)
        yield


def token_rewards(case: Case, penalty: torch.Tensor | None = None) -> torch.Tensor:
    """(B, T): the reward at the last action of a row, minus the penalty of each action."""
    rewards = torch.zeros_like(case.mask)
    for row, (reward, known) in enumerate(zip(case.rewards, case.has_reward, strict=True)):
        actions = case.mask[row].nonzero()
        if known and len(actions):
            rewards[row, actions[-1]] = reward or 0.0
    return rewards if penalty is None else (rewards - penalty) * case.mask


def known_mask(case: Case) -> torch.Tensor:
    """(B, T): the actions of rows that have a reward."""
    return case.mask * torch.tensor(case.has_reward).double()[:, None]


def returns(case: Case, rewards: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """REINFORCE++'s whitened returns (B, T)."""
    config = types.SimpleNamespace(gamma=gamma)
    estimator = CORE.get_adv_estimator_fn("reinforce_plus_plus")
    advantages: torch.Tensor = estimator(rewards, known_mask(case), config=config)[0]
    return advantages


def baseline(case: Case) -> torch.Tensor:
    """REINFORCE++-baseline's advantages (B, T), rows without a reward left out."""
    known = [row for row, is_known in enumerate(case.has_reward) if is_known]
    estimator = CORE.get_adv_estimator_fn("reinforce_plus_plus_baseline")
    index = np.array([case.group[row] for row in known])
    found = torch.zeros_like(case.mask)
    rewards = torch.zeros_like(case.mask)
    for row in known:
        rewards[row, 0] = case.rewards[row] or 0.0
    found[known] = estimator(rewards[known], case.mask[known], index=index)[0]
    return found


def gae(
    case: Case, rewards: torch.Tensor, values: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whitened advantages and returns (B, T)."""
    found: tuple[torch.Tensor, torch.Tensor] = CORE.compute_gae_advantage_return(
        rewards, values, known_mask(case), gamma, lam
    )
    return found


def value_loss(
    now: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, clip: float
) -> torch.Tensor:
    """The clipped value loss, a mean over tokens."""
    loss: torch.Tensor = CORE.compute_value_loss(now, returns, before, mask, clip)[0]
    return loss


def rejection_mask(case: Case, *, low: float, high: float) -> torch.Tensor:
    """(B, T): the mask, without the sequences whose geometric mean of pi_prox / mu is outside the
    bounds."""
    mask, _ = CORRECTIONS.compute_rollout_rejection_mask(
        case.proximal - case.behaviour, case.mask, "seq_mean_k1", f"{1 / high}_{1 / low}"
    )
    return mask


def entropy_bonus(case: Case, entropies: torch.Tensor, *, aggregation: str, longest: int) -> Answer:
    """verl's mean of the entropies (B, T), without a weight. Its `value_gradient` is the one with
    respect to them. verl's mean over a sequence divides by its length plus 1e-8, which is multiplied
    back."""
    leaf = entropies.clone().requires_grad_()
    wide: torch.Tensor = leaf
    if aggregation == "sequence_mean":
        count = case.mask.sum(-1, keepdim=True)
        wide = wide * (count + 1e-8) / count.clamp(min=1)
    value = CORE.agg_loss(
        loss_mat=wide,
        loss_mask=case.mask,
        loss_agg_mode=AGGREGATION[aggregation],
        **({"loss_scale_factor": longest} if aggregation == "constant" else {}),
    )
    value.backward()
    return Answer(float(value.detach()), torch.zeros_like(case.now), leaf.grad)
