"""Schulman's estimators of KL(pi || ref) from one action (joschu.net/blog/kl-approx.html).

    d = log pi_ref(t) - log pi_theta(t)
    k1 = -d              unbiased, noisy, of either sign
    k2 = d^2 / 2         slightly biased, never negative
    k3 = exp(d) - d - 1  unbiased, never negative

All three estimate the same value, but their gradients differ. In the loss, the expected gradient of k1
is zero, so it only adds noise. The expected gradient of k2 is that of KL(pi || ref), and that of k3 is
the gradient of KL(ref || pi). In the reward no gradient flows, so there only the value matters. The
log-ratio is clamped to +-20 before exp, and only there.
"""

import torch

from schemas.config import KlEstimator
from trainer.forward.packing import MicroBatch
from trainer.objective.hyperparameters import Hyperparameters
from trainer.policy import Policy

MAX_LOG_RATIO = 20.0


def k1(d_M: torch.Tensor) -> torch.Tensor:
    """The estimate k1 (M) from the log-ratios d (M)."""
    return -d_M


def k2(d_M: torch.Tensor) -> torch.Tensor:
    """The estimate k2 (M) from the log-ratios d (M)."""
    return d_M.square() / 2


def k3(log_ratio_M: torch.Tensor) -> torch.Tensor:
    """The estimate k3 (M) from the log-ratios d (M), which are clamped to +-20 first."""
    d_M = log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d_M.exp() - d_M - 1


def divergence(estimator: KlEstimator, d_M: torch.Tensor) -> torch.Tensor:
    """The KL estimate (M) at each action, from d = log pi_ref - log pi_theta (M)."""
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](d_M)


def kl_to_reference(
    policy: Policy,
    micro: MicroBatch,
    logprob_M: torch.Tensor,
    hyperparameters: Hyperparameters,
) -> torch.Tensor:
    """The estimate (M) of KL(pi || ref) at each action. The reference policy is the base model without
    the trained tensors. It takes one more forward pass, without a gradient. `logprob_M` keeps its
    gradient."""
    with torch.no_grad():
        reference_M, _ = policy.logprobs(
            micro, temperature=hyperparameters.temperature, reference=True
        )
    return divergence(hyperparameters.kl_estimator, reference_M - logprob_M)
