"""The run and evaluation TOML: sections, keys, bounds and defaults.

The whole file is strict: an unknown section or key is refused with what was probably meant. A key
that is valid but whose feature is not built yet is refused by name at submit, never ignored.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from schemas.sampling import Precision

Algorithm = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_plus_plus",
    "ppo",
    "importance_sampling",
    "sft",
]
ExecutionMode = Literal["sync", "one_step_off_async", "fully_async"]
LossAggregation = Literal["token_mean", "sequence_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
Correction = Literal["ratio", "decoupled", "truncated", "masked"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
LossTurns = Literal["assistant", "last", "all"]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
NonEmpty = Annotated[str, StringConstraints(min_length=1, pattern=r"^\S+$")]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Experiment(Section):
    """`rollout` and `entrypoint` may be absent for sft only; `dataset` is a registered dataset."""

    rollout: Name | None = None
    entrypoint: str | None = None
    model_path: Annotated[str, StringConstraints(min_length=1)]
    dataset: Annotated[str, StringConstraints(min_length=1)]
    branch: NonEmpty | None = None
    commit_sha: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{7,40}$")] | None = None


class Training(Section):
    lr: float = Field(default=1e-6, gt=0, le=1)
    total_epochs: int = Field(default=1, ge=1, le=10_000)
    n_samples_per_prompt: int = Field(default=8, ge=1, le=1024)
    rollout_batch_size: int = Field(default=32, ge=1, le=1_000_000)
    max_prompt_length: int = Field(default=8192, ge=1, le=262_144)
    max_response_length: int = Field(default=8192, ge=1, le=262_144)
    agent_workflow_timeout_s: float = Field(default=450, ge=1, le=86_400)
    grader_timeout_s: float = Field(default=150, ge=1, le=86_400)


class Sampling(Section):
    rollout_temperature: float = Field(default=1.0, ge=0, le=2)
    rollout_top_p: float = Field(default=1.0, ge=0, le=1)


class Checkpoints(Section):
    eval_interval: int | None = Field(default=None, ge=1, le=1_000_000)
    checkpoint_save_freq: int = Field(default=20, ge=1, le=1_000_000)


class RewardWeight(Section):
    """A reward function of the rollout and its weight in the sum."""

    name: Annotated[str, StringConstraints(min_length=1)]
    weight: float = Field(default=1.0)


class Advanced(Section):
    """Everything of ours. None means: the algorithm's own default."""

    algorithm: Algorithm = "grpo"
    execution_mode: ExecutionMode = "sync"
    max_steps_off_policy: int | None = Field(default=None, ge=0, le=64)
    weight_sync_interval: int = Field(default=1, ge=1, le=64)
    max_steps: int | None = Field(default=None, ge=1, le=10_000_000)
    seed: int = Field(default=0, ge=0, lt=2**31)
    deterministic: bool = False
    tuning: Literal["lora", "full"] = "lora"
    lora_rank: int = Field(default=16, ge=1, le=512)
    lora_alpha: float = Field(default=32.0, gt=0, le=4096)
    lora_targets: str | tuple[str, ...] = Field(default="all-linear")
    kl_coef: float | None = Field(default=None, ge=0, le=10)
    clip_low: float | None = Field(default=None, gt=0, le=10)
    clip_high: float | None = Field(default=None, gt=0, le=10)
    loss_aggregation: LossAggregation | None = None
    clip_delta: float | None = Field(default=None, gt=1, le=1000)
    kl_estimator: KlEstimator | None = None
    kl_in: KlPlace | None = None
    correction: Correction = "ratio"
    correction_level: CorrectionLevel | None = None
    correction_low: float | None = Field(default=None, ge=0, le=1)
    correction_high: float | None = Field(default=None, ge=1, le=1000)
    off_policy_threshold: float | None = Field(default=None, gt=0, le=100)
    updates_per_step: int = Field(default=1, ge=1, le=64)
    filter_groups: bool | None = None
    max_replacements: int | None = Field(default=None, ge=0, le=64)
    overlong_buffer: int | None = Field(default=None, ge=0, le=262_144)
    overlong_penalty: float | None = Field(default=None, ge=0, le=1000)
    group_baseline: bool | None = None
    gamma: float | None = Field(default=None, gt=0, le=1)
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    value_clip: float | None = Field(default=None, gt=0, le=1000)
    value_coef: float | None = Field(default=None, gt=0, le=100)
    critic_lr: float | None = Field(default=None, gt=0, le=1)
    grad_clip: float = Field(default=1.0, gt=0, le=1e6)
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float | None = Field(default=None, ge=0, lt=1)
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    lr_min_ratio: float = Field(default=0.0, ge=0, le=1)
    micro_batch_tokens: int | None = Field(default=None, ge=16, le=10_000_000)
    precision: Precision = "float32"
    recompute: bool = False
    compile: bool = False
    rewards: tuple[RewardWeight, ...] = Field(default=())
    validation_dataset: str | None = None
    validation_samples: int = Field(default=1, ge=1, le=1024)
    validation_temperature: float = Field(default=0.0, ge=0, le=2)
    loss_turns: LossTurns | None = None
    batch_size: int = Field(default=16, ge=1, le=65_536)
    max_sequence_length: int = Field(default=2048, ge=8, le=262_144)
    state_interval: int | None = Field(default=None, ge=1, le=10_000)


class Secrets(Section):
    required: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")], ...] = Field(
        default=()
    )


EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Z_][A-Z0-9_]*$")]


class RunConfig(Section):
    """A whole training TOML."""

    experiment: Experiment
    training: Training = Training()
    sampling: Sampling = Sampling()
    checkpoints: Checkpoints = Checkpoints()
    advanced: Advanced = Advanced()
    env: dict[EnvName, str] = {}
    secrets: Secrets = Secrets()

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.experiment.branch and self.experiment.commit_sha:
            raise ValueError("experiment: give either branch or commit_sha, not both")
        if self.advanced.algorithm != "sft" and not (
            self.experiment.rollout and self.experiment.entrypoint
        ):
            raise ValueError(
                "experiment: rollout and entrypoint are needed unless algorithm is sft"
            )
        return self


class Evaluation(Section):
    limit: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1, le=1024)
    batch_size: int = Field(default=1, ge=1, le=10_000)
    pass_threshold: float = Field(default=1.0)
    agent_workflow_timeout_s: float = Field(default=450, ge=1, le=86_400)
    grader_timeout_s: float = Field(default=150, ge=1, le=86_400)


class EvalAdvanced(Section):
    seed: int = Field(default=0, ge=0, lt=2**31)
    deterministic: bool = False
    temperature: float = Field(default=0.0, ge=0, le=2)
    max_prompt_length: int = Field(default=8192, ge=1, le=262_144)
    max_response_length: int = Field(default=8192, ge=1, le=262_144)
    rewards: tuple[RewardWeight, ...] = Field(default=())


class EvalConfig(Section):
    """A whole evaluation TOML."""

    experiment: Experiment
    evaluation: Evaluation = Evaluation()
    advanced: EvalAdvanced = EvalAdvanced()
    env: dict[EnvName, str] = {}
    secrets: Secrets = Secrets()
