"""REINFORCE++ (arXiv 2501.03262), and its form with a group baseline.

    r_t  = - beta KL_t  (+ R_i at the last action)      the KL is part of the reward, k1 by default
    G_t  = sum_{k >= 0} gamma^k r_{t+k}
    A_t  = (G_t - mean G) / std G                       over all actions of the step
    loss = - (1 / sum_i len_i) sum_i sum_t min(r_t A_t, clip(r_t) A_t)

With group_baseline: A_i = R_i - mean_G R first, then the same whitening, and the KL is in the loss:

    + beta (1 / sum_i len_i) sum_i sum_t k2_t,     k2_t = (log pi_theta(t) - log pi_ref(t))^2 / 2

We decided this because it is the paper's form with a baseline, and because k2 is the estimator whose
gradient in the loss is that of KL(pi || ref). Other trainers put the KL into the reward in this form,
too. For that, set `kl_in = "reward"` (R_i minus the KL of the whole sample) and `kl_estimator = "k1"`.
These are the defaults of runs that started with rules 1 (`schemas.learner`).

There is no critic. The baseline is the mean of the batch. So one sample per prompt is enough, and
without the group baseline the policy also learns from a group whose rewards are all equal. Whitening has
ddof = 1 and 1e-8 under the root, as in verl. Actions of samples without a reward are left out of it and
get 0. If all values are equal, all advantages are exactly 0. A reward that is alone in its group is its
own baseline (in verl it has none).
"""

from trainer.algorithms.dr_grpo import advantages
from trainer.grpo import loss
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import BatchBeforeUpdate, Estimate, Objective, by_group, whiten
from trainer.objective.returns import discounted_sums, reward_at_last_action


def estimate(before: BatchBeforeUpdate, hyperparameters: Hyperparameters) -> Estimate:
    """Whitened returns, or with a group baseline whitened differences from the mean of the group."""
    if hyperparameters.group_baseline:
        centred_E = by_group(advantages)(before, hyperparameters).advantage_E
        return Estimate(whiten(centred_E, before.known_E))
    reward_E = reward_at_last_action(before.reward_S, before.sample_E)
    if before.penalty_E is not None:
        reward_E = reward_E - before.in_time(before.penalty_E)
    return_E = discounted_sums(reward_E, before.sample_E, factor=hyperparameters.gamma)
    return Estimate(whiten(before.in_rows(return_E), before.known_E))


OBJECTIVE = Objective(
    estimate=estimate,
    loss=loss,
    defaults=Hyperparameters(aggregation="token_mean", kl_in="reward", kl_estimator="k1"),
    with_baseline=Hyperparameters(aggregation="token_mean", kl_in="loss", kl_estimator="k2"),
)
