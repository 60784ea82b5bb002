"""The names of our keys in other trainers, for the suggestion that an unrecognized key gets.

Names with a similar spelling are found by comparison (`schemas/toml/parser.py`). This table holds the
others.
"""

from collections.abc import Collection

MEANT: dict[str, tuple[str, ...]] = {
    "advanced.adam_beta1": ("beta1",),
    "advanced.adam_beta2": ("beta2",),
    "advanced.algorithm": ("advantage_estimator", "adv_estimator", "loss_type", "objective"),
    "advanced.preference_loss": ("dpo_loss", "pref_loss"),
    "advanced.simpo_gamma": ("gamma_beta_ratio", "target_margin"),
    "advanced.batch_size": ("train_batch_size", "per_device_train_batch_size"),
    "advanced.center_rewards_coefficient": ("center_rewards_coef", "reward_center_coef"),
    "advanced.clip_high": ("epsilon_high", "clip_ratio_high", "clip_range_high", "eps_clip_high"),
    "advanced.clip_low": (
        *("epsilon", "clip_ratio", "clip_range", "cliprange", "eps_clip"),
        *("clip_epsilon", "epsilon_low", "clip_ratio_low"),
    ),
    "advanced.cov_high": ("clip_cov_ub", "clip_cov_max"),
    "advanced.cov_kl_coef": ("ppo_kl_coef", "kl_cov_coef"),
    "advanced.cov_low": ("clip_cov_lb", "clip_cov_min"),
    "advanced.cov_ratio": ("clip_cov_ratio", "kl_cov_ratio"),
    "advanced.critic_lr": ("critic_learning_rate", "value_lr"),
    "advanced.curriculum": (
        *(
            "min_pass_rate",
            "max_pass_rate",
            "oversampling_factor",
            "easy_fraction",
            "hard_fraction",
        ),
        *("easy_threshold", "hard_threshold", "difficulty_pools", "pass_reward"),
    ),
    "advanced.curriculum.max_pass_rate": ("easy_threshold",),
    "advanced.curriculum.min_pass_rate": ("hard_threshold",),
    "advanced.entropy_coef": ("ent_coef", "entropy_coeff", "entropy_loss_coef", "entropy_beta"),
    "advanced.entropy_target": ("target_ent", "target_entropy", "tgt_ent"),
    "advanced.gae_lambda": ("lam", "lambda", "gae_lam"),
    "advanced.grad_clip": ("max_grad_norm", "clip_grad", "max_norm", "gradient_clipping"),
    "advanced.kl_coef": (
        *("beta", "kl_penalty", "kl_beta", "kl_loss_coef", "init_kl_coef", "kl_weight", "kl"),
        *("kl_penalty_coef", "kl_coefficient"),
    ),
    "advanced.lora_rank": ("lora_r", "r", "rank"),
    "advanced.lora_scaling": ("use_rslora", "rslora"),
    "advanced.lora_targets": ("target_modules", "lora_target_modules"),
    "advanced.lora_variant": ("use_dora", "dora"),
    "advanced.loss_aggregation": ("loss_agg_mode", "loss_reduction"),
    "advanced.lr_schedule": ("lr_scheduler_type", "lr_scheduler", "scheduler"),
    "advanced.mask_truncated": ("mask_truncated_completions", "overlong_filter"),
    "advanced.max_sequence_length": ("max_seq_length", "max_length", "cutoff_len"),
    "advanced.max_steps": ("num_steps", "total_steps", "steps", "total_training_steps"),
    "advanced.micro_batch_tokens": ("ppo_max_token_len_per_gpu", "max_tokens_per_batch"),
    "advanced.minibatch_size": ("ppo_mini_batch_size", "mini_batch_size", "global_batch_size"),
    "advanced.muon_momentum": ("momentum",),
    "advanced.optimizer": ("optim", "optimizer_type", "optimizer_name"),
    "advanced.precision": ("dtype", "torch_dtype", "bf16", "mixed_precision"),
    "advanced.recompute": ("gradient_checkpointing", "enable_gradient_checkpointing"),
    "advanced.rewards": ("reward_funcs", "reward_functions", "reward_fns"),
    "advanced.seed": ("random_seed",),
    "advanced.tau_neg": ("sapo_temperature_neg", "sapo_tau_neg"),
    "advanced.tau_pos": ("sapo_temperature_pos", "sapo_tau_pos"),
    "advanced.teacher_api_key_secret": ("teacher_api_key",),
    "advanced.teacher_base_url": ("teacher_server", "teacher_url", "teacher_server_url"),
    "advanced.teacher_hint": ("hint",),
    "advanced.teacher": ("teacher_model", "teacher_model_name_or_path", "teacher_model_path"),
    "advanced.updates_per_step": ("num_iterations", "ppo_epochs", "mu"),
    "advanced.validation_dataset": ("eval_dataset", "val_dataset", "test_dataset"),
    "advanced.value_clip": ("vf_clip", "cliprange_value"),
    "advanced.value_coef": ("vf_coef", "value_loss_coef"),
    "advanced.warmup_steps": ("warmup", "num_warmup_steps", "lr_warmup_steps"),
    "checkpoints.checkpoint_save_freq": ("save_steps", "save_freq", "save_interval"),
    "checkpoints.eval_interval": ("eval_steps", "test_freq", "val_interval"),
    "evaluation.n": ("n_samples", "num_samples", "n_samples_per_prompt"),
    "experiment.dataset": ("train_dataset", "dataset_name", "train_files", "data"),
    "experiment.model_path": ("model", "model_name", "base_model", "model_name_or_path"),
    "sampling.rollout_temperature": ("temperature", "temp"),
    "training.lr": ("learning_rate", "actor_lr", "step_size"),
    "training.max_prompt_length": ("max_prompt_tokens", "prompt_length"),
    "training.max_answer_length": ("max_tokens_per_turn", "max_tokens_per_request"),
    "training.max_response_length": (
        *("max_completion_length", "max_new_tokens", "max_tokens", "response_length"),
        *("max_completion_tokens", "generate_max_len"),
    ),
    "training.n_samples_per_prompt": ("num_generations", "group_size", "n", "num_samples"),
    "training.rollout_batch_size": ("prompts_per_step", "num_prompts", "groups_per_step"),
    "training.total_epochs": ("epochs", "num_epochs", "num_train_epochs"),
}
"""`section.key` -> its names in other trainers."""


def hint(name: str, known: Collection[str]) -> str | None:
    """The `section.key` in `known` that other trainers call `name`; None if there is none."""
    wanted = name.lower().replace("-", "_")
    return next((full for full, names in MEANT.items() if wanted in names and full in known), None)
