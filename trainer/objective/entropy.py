"""The weight of the entropy bonus, and how it follows a target (Skywork-OR1, arXiv 2505.22312).

    loss  = ... - c_k sum_t w_t H_t     H_t: the entropy of the distribution that action t was drawn from
    e_k   = the mean of H_t over the actions and updates of step k
    c_k   = a_k if e_{k-1} <= target, else 0               0 in the first step
    a_k+1 = min(a_k + delta, max) if e_k <= target, else max(a_k - delta, 0)

w_t are the weights of the loss, so a masked sample has no bonus. With a fixed weight c_k is
`entropy_coef`, and with a target a_1 is. We decided to compare with the entropy of the step before, as
TRL does, because that of the step itself would need one more forward pass. TRL takes the mean over
tokens in the loss whatever its type is, and moves the weight after each update instead of each step.

The weight and the entropy are part of a version's state, so a resumed run goes on with both. A step that
changes nothing changes neither.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from schemas.algorithms import ENTROPY_COEF_DELTA, ENTROPY_COEF_MAX
from schemas.config import Advanced
from schemas.errors import CorruptData

COEF, SEEN = "entropy.coef", "entropy.seen"


@dataclass(frozen=True, slots=True)
class EntropyControl:
    """The weight a_k, and the entropy e_{k-1} of the step before, which is infinite before the first."""

    coef: float
    seen: float = math.inf

    @classmethod
    def fresh(cls, advanced: Advanced) -> "EntropyControl | None":
        """The control of version 0. None for a run without a target."""
        return None if advanced.entropy_target is None else cls(advanced.entropy_coef or 0.0)

    def next_coef(self, advanced: Advanced) -> float:
        """c_k, the weight of the next step."""
        return self.coef if _is_low(self.seen, advanced) else 0.0

    def after(self, metrics: Mapping[str, float], advanced: Advanced) -> "EntropyControl":
        """The control after a step with these metrics."""
        entropy = metrics.get("train/entropy_loss", math.nan)
        if metrics.get("train/skipped") or not math.isfinite(entropy):
            return self
        delta = advanced.entropy_coef_delta or ENTROPY_COEF_DELTA
        most = advanced.entropy_coef_max or ENTROPY_COEF_MAX
        is_low = _is_low(entropy, advanced)
        moved = min(self.coef + delta, most) if is_low else max(self.coef - delta, 0.0)
        return EntropyControl(moved, entropy)

    def state(self) -> dict[str, torch.Tensor]:
        """Both numbers as named tensors, float64."""
        pairs = {COEF: self.coef, SEEN: self.seen}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in pairs.items()}


def load_control(state: Mapping[str, torch.Tensor]) -> EntropyControl:
    """The control whose `state` this is. Raises CorruptData when it is not complete."""
    if COEF not in state or SEEN not in state:
        raise CorruptData("the state of this version has no weight of the entropy bonus")
    return EntropyControl(float(state[COEF]), float(state[SEEN]))


def _is_low(entropy: float, advanced: Advanced) -> bool:
    return advanced.entropy_target is not None and entropy <= advanced.entropy_target
