"""The hyperparameters of all objectives in one flat class. Each objective reads those that it uses.

The defaults are GRPO's. Every other objective declares its own where they differ, and the values that
a run sets take precedence (`trainer/algorithms/registry.py`). No torch.
"""

from dataclasses import dataclass

from schemas.config import Correction, CorrectionLevel, KlEstimator, KlPlace, LossAggregation


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The values of one run."""

    temperature: float = 1.0
    """divides the logits, here as in sampling"""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """the ratio is clipped to 1 - clip_low ... 1 + clip_high"""
    clip_delta: float | None = None
    """`trainer/objective/dual_clip.py`; None: off"""
    kl_coef: float = 0.0
    """beta; with 0 no reference pass is computed"""
    kl_estimator: KlEstimator = "k3"
    kl_in: KlPlace = "loss"
    aggregation: LossAggregation = "sequence_mean"
    max_response_length: int = 1
    micro_batch_tokens: int = 4096
    splits_groups: bool = True
    """whether a group that shares a prompt is split when it does not fit into one micro-batch"""
    updates: int = 1
    """optimizer updates per batch; each goes over the whole batch"""
    correction: Correction = "ratio"
    """what the ratio is taken against: `trainer/objective/correction.py`"""
    correction_level: CorrectionLevel = "token"
    correction_low: float = 0.5
    correction_high: float = 2.0
    off_policy_threshold: float | None = None
    """`trainer/objective/sequence_mask.py`; None: off"""
    overlong_buffer: int = 0
    """tokens before max_response_length in which the penalty grows; 0: off"""
    overlong_penalty: float = 1.0
    group_baseline: bool = False
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_clip: float = 0.2
    value_coef: float = 0.1
