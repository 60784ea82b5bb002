"""Every objective, and every option of one that changes a formula, as keys of `[advanced]`."""

from typing import Any

PARTS = ({"name": "right", "weight": 1.0}, {"name": "short", "weight": 0.5})

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.05},
    "dr_grpo": {"algorithm": "dr_grpo"},
    "dapo": {"algorithm": "dapo", "overlong_buffer": 4},
    "gspo": {"algorithm": "gspo", "clip_low": 0.2, "clip_high": 0.3},
    "luspo": {"algorithm": "luspo", "clip_low": 0.2, "clip_high": 0.3},
    "gmpo": {"algorithm": "gmpo"},
    "cispo": {"algorithm": "cispo"},
    "sapo": {"algorithm": "sapo"},
    "dppo": {"algorithm": "dppo", "clip_low": 0.01, "clip_high": 0.01},
    "dppo, kl": {"algorithm": "dppo", "divergence": "kl", "clip_low": 1e-3, "clip_high": 1e-3},
    "clip_cov": {"algorithm": "clip_cov", "cov_ratio": 0.2, "cov_low": 0.0, "clip_high": 0.3},
    "kl_cov": {"algorithm": "kl_cov", "cov_ratio": 0.3},
    "gpg": {"algorithm": "gpg"},
    "gdpo": {"algorithm": "gdpo", "rewards": PARTS},
    "maxrl": {"algorithm": "maxrl"},
    "rloo": {"algorithm": "rloo"},
    "rloo, kl in the reward": {"algorithm": "rloo", "kl_coef": 0.1, "kl_in": "reward"},
    "reinforce++": {"algorithm": "reinforce_plus_plus", "kl_coef": 0.1, "gamma": 0.9},
    "reinforce++ baseline": {
        "algorithm": "reinforce_plus_plus",
        "group_baseline": True,
        "kl_coef": 0.1,
    },
    "reinforce++ baseline, kl in the reward": {
        "algorithm": "reinforce_plus_plus",
        "group_baseline": True,
        "kl_coef": 0.1,
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    "ppo": {"algorithm": "ppo"},
    "ppo, two updates": {
        "algorithm": "ppo",
        "updates_per_step": 2,
        "kl_coef": 0.05,
        "gamma": 0.95,
        "value_clip": 0.05,
    },
    "importance sampling": {"algorithm": "importance_sampling"},
    "decoupled": {"correction": "decoupled", "updates_per_step": 2},
    "truncated": {"correction": "truncated", "correction_high": 1.1, "updates_per_step": 2},
    "masked sequences": {
        "correction": "masked",
        "correction_level": "sequence",
        "correction_low": 0.3,
        "correction_high": 4.0,
        "updates_per_step": 2,
    },
    "masked geometric": {
        "correction": "masked",
        "correction_level": "geometric",
        "correction_low": 0.5,
        "correction_high": 1.4,
        "updates_per_step": 2,
    },
    "mini-batches": {"minibatch_size": 16, "updates_per_step": 2, "correction": "decoupled"},
    "ppo, mini-batches": {"algorithm": "ppo", "minibatch_size": 16},
    "entropy bonus": {"entropy_coef": 0.3, "loss_aggregation": "token_mean"},
    "entropy target": {"entropy_target": 9.0, "entropy_coef_delta": 0.1, "minibatch_size": 16},
    "two-sided": {"clip_delta": 1.3, "kl_coef": 0.1, "kl_estimator": "k1"},
    "sequence mask": {"off_policy_threshold": 0.05},
}
