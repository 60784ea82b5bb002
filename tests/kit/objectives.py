"""Every objective as keys of `[advanced]`, for short runs of a whole platform."""

from typing import Any

RUNS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"algorithm": "dr_grpo", "off_policy_threshold": 0.5},
    "dapo": {"algorithm": "dapo", "overlong_buffer": 3, "max_replacements": 3},
    "gspo": {"algorithm": "gspo"},
    "luspo": {"algorithm": "luspo"},
    "gmpo": {"algorithm": "gmpo"},
    "cispo": {"algorithm": "cispo"},
    "sapo": {"algorithm": "sapo"},
    "dppo": {"algorithm": "dppo", "divergence": "kl"},
    "clip_cov": {"algorithm": "clip_cov", "cov_ratio": 0.2, "cov_low": 0.0},
    "kl_cov": {"algorithm": "kl_cov", "cov_ratio": 0.2, "updates_per_step": 2},
    "gpg": {"algorithm": "gpg"},
    "maxrl": {"algorithm": "maxrl"},
    "rloo": {"algorithm": "rloo", "kl_coef": 0.1, "kl_in": "reward"},
    "reinforce_plus_plus": {"algorithm": "reinforce_plus_plus", "kl_coef": 0.1},
    "ppo": {"algorithm": "ppo", "updates_per_step": 2},
    "importance_sampling": {"algorithm": "importance_sampling"},
    "online_dpo": {"algorithm": "online_dpo", "beta": 0.5},
    "mini-batches": {"minibatch_size": 4, "updates_per_step": 2},
    "curriculum": {
        "execution_mode": "one_step_off_async",
        "curriculum": {
            "min_pass_rate": 0.3,
            "max_pass_rate": 0.9,
            "hard_fraction": 0.25,
            "pass_reward": 0.125,
            "oversampling_factor": 1.5,
        },
    },
    "entropy": {"entropy_target": 9.0, "entropy_coef": 0.02, "minibatch_size": 4},
    "masked": {"correction": "masked", "updates_per_step": 2, "clip_delta": 2.0},
    "dora": {"lora_variant": "dora"},
    "muon": {"optimizer": "muon", "algorithm": "ppo"},
    "rslora": {"lora_scaling": "rank_stabilized", "lora_rank": 64},
}
"""Those that sample. GDPO is not among them, since its rollout must name its rewards."""

PREFERENCES: dict[str, dict[str, Any]] = {
    "dpo": {"algorithm": "dpo"},
    "dpo_norm": {"algorithm": "dpo", "preference_loss": "sigmoid_norm", "tuning": "full"},
    "ipo": {"algorithm": "dpo", "preference_loss": "ipo"},
    "hinge": {"algorithm": "dpo", "preference_loss": "hinge"},
    "kto": {"algorithm": "kto"},
    "orpo": {"algorithm": "orpo"},
    "simpo": {"algorithm": "simpo"},
    "reward_model": {"algorithm": "reward_model", "center_rewards_coefficient": 0.01},
}
"""Those that learn from rows of preferences."""
