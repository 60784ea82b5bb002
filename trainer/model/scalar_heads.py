"""Heads that turn a policy's last hidden state into a number: the critic of PPO, and a reward model's.

    V_t = w . h_t + b        h_t: the state that predicts action t, before the output head

The critic starts at 0, so that the first step's advantages are plain rewards to go. It reads the same
forward pass as the policy, which makes it nearly free. Its tensors are not part of the policy's weights,
so that plain PEFT can load an adapter. They and the moments of their own optimizer are part of the
learner's state.

    r(x, y) = w . h          h: the state of the last token of answer y, which ends its turn

The head of a reward model is part of its weights. It is the layer `score` of Transformers' models for
sequence classification with one label, and has peft's name for it, so a checkpoint loads there. Like
there it is drawn from a normal distribution with the model's `initializer_range`. The draw is keyed by
the seed, like those of an adapter.
"""

import hashlib
from dataclasses import dataclass

import torch

from trainer.model.base import Base
from trainer.model.lora_names import PEFT_PREFIX, Tensors

WEIGHT, BIAS = "value.weight", "value.bias"

SCORE = "score"
SCORE_NAME = f"{PEFT_PREFIX}{SCORE}.weight"
"""The name of the weight (1, H) of a reward model's head among the trained tensors."""


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


def fresh_score_head(base: Base, *, seed: int) -> dict[str, torch.Tensor]:
    """Version 0 of the head of a reward model, fp32."""
    output = base.model.get_output_embeddings().weight
    key = hashlib.sha256(f"{SCORE}/{seed}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
    normal = torch.randn(1, output.shape[1], generator=generator, dtype=torch.float32)
    spread = float(getattr(base.model.config.get_text_config(), "initializer_range", 0.02))
    return {SCORE_NAME: (normal * spread).to(output.device)}


def scores(tensors: Tensors, hidden_R_H: torch.Tensor) -> torch.Tensor:
    """The reward (R) of each conversation, from the hidden state of its last token. At least fp32."""
    weight_1_H = tensors[SCORE_NAME]
    return (hidden_R_H.to(weight_1_H.dtype) @ weight_1_H.T)[:, 0]
