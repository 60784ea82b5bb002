# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""The distributions that a policy predicts, before their logits are computed.

The logits of all actions would be the largest tensor of a step, so they are computed for a few actions
at a time, from the states and the output head (`trainer/forward/logprobs.py`).

Shape suffixes: M actions, H hidden, V vocabulary, C actions of a chunk.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trainer.forward.allowed_tokens import AllowedTokens
from trainer.forward.lm_head import logits_of


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """The states (M, H) that predict each action, and the weight (V, H) of the output head. Without a
    head the states are the logits (M, V) themselves. `allowed` are the tokens that each action was drawn
    from; None where each was drawn from all."""

    states_M_H: torch.Tensor
    head_V_H: torch.Tensor | None = None
    allowed: AllowedTokens | None = None

    @property
    def num_tokens(self) -> int:
        """V, the number of tokens that the head tells apart."""
        if self.head_V_H is None:
            return self.states_M_H.shape[-1]
        return len(self.head_V_H)

    def select(self, here: slice) -> "Predictions":
        """The predictions of some of the actions."""
        allowed = None if self.allowed is None else self.allowed[here]
        return Predictions(self.states_M_H[here], self.head_V_H, allowed)

    def logprobs(self, *, temperature: float, num_tokens: int) -> torch.Tensor:
        """The log-probabilities (M, `num_tokens`) of the first tokens of the vocabulary at
        `temperature`. They are normalised over those of these tokens that are allowed."""
        if self.head_V_H is None:
            logits = self.states_M_H[:, :num_tokens]
        else:
            logits = logits_of(self.states_M_H, self.head_V_H[:num_tokens])
        logits = logits / temperature
        if self.allowed is not None:
            logits = self.allowed.restrict(logits)
        return F.log_softmax(logits, dim=-1)
