"""The critic of PPO: a linear value head on the policy's last hidden state.

    V_t = w . h_t + b        h_t: the state that predicts action t, before the output head

It starts at 0, so that the first step's advantages are plain rewards to go. It reads the same forward
pass as the policy, which makes it nearly free. Its tensors are not part of the policy's weights, so that
plain PEFT can load an adapter. They and the moments of their own optimizer are part of the learner's
state.
"""

from dataclasses import dataclass

import torch

from trainer.model.base import Base

WEIGHT, BIAS = "value.weight", "value.bias"


@dataclass(frozen=True, slots=True, eq=False)
class Critic:
    """`tensors` are leaves: the weight (H) and the bias (1)."""

    tensors: dict[str, torch.Tensor]

    def values(self, hidden_M_H: torch.Tensor) -> torch.Tensor:
        """The value (M) before each action."""
        weight_H = self.tensors[WEIGHT]
        return hidden_M_H.to(weight_H.dtype) @ weight_H + self.tensors[BIAS]


def fresh_critic(base: Base) -> Critic:
    """A critic whose values are all 0."""
    head = base.model.get_output_embeddings().weight
    dtype = torch.promote_types(head.dtype, torch.float32)
    weight = torch.zeros(head.shape[1], dtype=dtype, device=head.device)
    return Critic({WEIGHT: weight, BIAS: torch.zeros_like(weight[:1])})
