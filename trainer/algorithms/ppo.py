"""PPO with a critic: proximal policy optimization (arXiv 1707.06347) with GAE (arXiv 1506.02438).

    r_t     = - beta KL_t  (+ R_i at the last action)       the KL is part of the reward
    delta_t = r_t + gamma V_{t+1} - V_t,                    V = 0 after the last action
    A_t     = sum_{k >= 0} (gamma lambda)^k delta_{t+k},    G_t = A_t + V_t
    loss    = - (1 / sum_i len_i) sum_t min(r_t A_t, clip(r_t) A_t)  +  c L_V
    L_V     = (1 / sum_i len_i) sum_t max((V - G)^2, (clip(V, V_old - e, V_old + e) - G)^2) / 2

V_t is the value that the critic (`trainer/model/scalar_heads.py`) predicts before action t, and V_old is
its prediction before the step. The gradient of the critic's loss also reaches the policy's tensors,
scaled by c = value_coef = 0.1, because the critic reads the policy's last hidden state. We decided: -
Advantages are whitened over all actions of the step (ddof 1, 1e-8 under the root). Returns are computed
  from the advantages before whitening. verl does both in one function, but here `gae` does not whiten.
- lambda is 0.95, as in the paper (verl's default is 1), and gamma is 1 because the reward comes at the
  end.
- A sample without a reward has advantage 0 and teaches the critic nothing. L_V is in
  `trainer/objective/value_loss.py`.
- With one update per step V equals V_old, and the ratio differs from 1 only by the distance between the
  sampler and the learner. PPO's epochs are `updates_per_step`, and its mini-batches `minibatch_size`.
"""

import torch

from trainer.grpo import loss
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import BatchBeforeUpdate, Estimate, Objective, whiten
from trainer.objective.returns import discounted_sums, next_values, reward_at_last_action


def gae(
    reward_E: torch.Tensor,
    value_E: torch.Tensor,
    sample_E: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation: the advantages (E), not whitened, and the returns (E)."""
    delta_E = reward_E + gamma * next_values(value_E, sample_E) - value_E
    advantage_E = discounted_sums(delta_E, sample_E, factor=gamma * gae_lambda)
    return advantage_E, advantage_E + value_E


def estimate(before: BatchBeforeUpdate, hyperparameters: Hyperparameters) -> Estimate:
    """Whitened advantages for the policy, and returns for the critic. Raises ValueError if the batch has
    no critic values."""
    if before.value_E is None:
        raise ValueError("PPO needs the critic's values")
    reward_E = reward_at_last_action(before.reward_S, before.sample_E)
    if before.penalty_E is not None:
        reward_E = reward_E - before.in_time(before.penalty_E)
    advantage_E, return_E = gae(
        reward_E,
        before.in_time(before.value_E),
        before.sample_E,
        gamma=hyperparameters.gamma,
        gae_lambda=hyperparameters.gae_lambda,
    )
    advantage_E = before.in_rows(advantage_E)
    return Estimate(whiten(advantage_E, before.known_E), before.in_rows(return_E))


OBJECTIVE = Objective(
    estimate=estimate,
    loss=loss,
    defaults=Hyperparameters(aggregation="token_mean", kl_in="reward", kl_estimator="k1"),
    has_critic=True,
)
