"""Liger: its GRPO loss from log-probabilities, and the fused one from hidden states.

`ppo_loss_fn` is the formula alone and keeps float64. The fused function computes log-probabilities
in chunks of the vocabulary and rounds to fp32 on the way.
"""

from typing import Any

import torch

from tests.oracles.available import oracle
from tests.oracles.cases import Answer, Case, answer

MODULE = oracle("liger_kernel.chunked_loss.grpo_loss")


def loss(case: Case, advantage_B: torch.Tensor, *, weights: Any = None, **settings: Any) -> Answer:
    """Liger's loss; `settings` are `ppo_loss_fn`'s (loss_type, epsilon_low, delta, beta ...).
    `weights` is its vllm_is_ratio."""
    against = settings.pop("against", case.behaviour)

    def loss_of(now: torch.Tensor) -> torch.Tensor:
        value, _ = MODULE.LigerFusedLinearGRPOFunction.ppo_loss_fn(
            per_token_logps=now,
            attention_mask=case.mask,
            advantages=advantage_B,
            full_attention_mask=case.mask,
            ref_per_token_logps=case.reference,
            old_per_token_logps=against,
            vllm_is_ratio=weights,
            **{"beta": 0.0, **settings},
        )
        return value

    return answer(case, loss_of)


def fused_loss(
    hidden_B_T_H: torch.Tensor,
    head_V_H: torch.Tensor,
    targets_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    advantage_B: torch.Tensor,
    behaviour_B_T: torch.Tensor,
    **settings: Any,
) -> torch.Tensor:
    """Liger's fused loss from hidden states, which computes in fp32."""
    module = MODULE.LigerFusedLinearGRPOLoss(
        compiled=False, beta=0.0, use_ref_model=False, **settings
    )
    value, _ = module(
        hidden_B_T_H,
        head_V_H,
        targets_B_T,
        mask_B_T,
        advantage_B,
        old_per_token_logps=behaviour_B_T,
    )
    return value
