"""Clip-Cov: no gradient for some actions that lower the entropy most (arXiv 2505.22617).

    loss = - (1 / sum_i len_i) sum_i sum_t m_t min(r_t A_i, clip(r_t, 1 - low, 1 + high) A_i)
    m_t  = 0 for a share `cov_ratio` of all actions, drawn from those with cov_low < Cov_t < cov_high
           that are not clipped, else 1

A_i is GRPO's, and Cov is in `trainer/objective/covariance.py`. The ratio is clipped at 0 and 2, as in
the authors' runs. Where there are not enough such actions, all of them are chosen.

We decided to choose once for the whole step, before its first update, as the paper describes it. verl
chooses in each micro-batch. The draw is keyed by the run's seed and the step, so that a step that is
taken again chooses the same actions. verl takes the state of torch's generator.
"""

import hashlib

import numpy as np
import torch

from trainer import grpo
from trainer.objective.covariance import MeasuredActions, choose_first, covariances
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import Actions, Objective, by_group


def select(actions: MeasuredActions, hyperparameters: Hyperparameters) -> torch.Tensor:
    """(E, bool): the actions that get no gradient."""
    _, clipped_E = grpo.clipped_loss(
        actions.log_ratio_E,
        actions.advantage_E,
        low=hyperparameters.clip_low,
        high=hyperparameters.clip_high,
        delta=hyperparameters.clip_delta,
    )
    cov_E = covariances(actions)
    within_E = (cov_E > hyperparameters.cov_low) & (cov_E < hyperparameters.cov_high)
    candidates = (within_E & ~clipped_E).nonzero().squeeze(-1)
    drawn_E = draws(len(cov_E), seed=hyperparameters.seed, step=hyperparameters.step)
    order = candidates[drawn_E[candidates].argsort(stable=True)]
    return choose_first(order, actions, hyperparameters.cov_ratio)


def draws(count: int, *, seed: int, step: int) -> torch.Tensor:
    """A random number (E) for each action of a step, by its place in the step. Philox is a
    counter-based generator, so the numbers depend on seed, step and place alone."""
    key = hashlib.sha256(f"clip_cov/{seed}/{step}".encode()).digest()[:16]
    bits = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(count)
    return torch.from_numpy((bits >> np.uint64(1)).astype(np.int64))


def loss(actions: Actions, hyperparameters: Hyperparameters) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss (M) of each action, and whether it is clipped or chosen (M, bool)."""
    loss_M, clipped_M = grpo.loss(actions, hyperparameters)
    chosen_M = actions.is_selected()
    return loss_M.masked_fill(chosen_M, 0), clipped_M | chosen_M


OBJECTIVE = Objective(
    estimate=by_group(grpo.advantages),
    loss=loss,
    defaults=Hyperparameters(clip_low=1.0, clip_high=1.0, aggregation="token_mean"),
    select=select,
)
