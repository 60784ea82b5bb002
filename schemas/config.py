"""The run and evaluation TOML: sections, keys, bounds and defaults.

The whole file is strict: an unknown section or key is refused with what was probably meant. A key
that is valid but whose feature is not built yet is refused by name at submit, never ignored.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from schemas.sampling import Day, Precision

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
    """the directory below `rollouts/` whose code runs"""
    entrypoint: str | None = None
    """its file with the AgentWorkflow and the Grader, as `main.py`"""
    model_path: Annotated[str, StringConstraints(min_length=1)]
    """`scratch:NAME`, a Hugging Face id, an absolute directory, or `RUN@STEP` (`RUN@last`)"""
    dataset: Annotated[str, StringConstraints(min_length=1)]
    """a registered dataset, by name or id"""
    branch: NonEmpty | None = None
    """the branch whose newest commit runs; default: what the repository has checked out"""
    commit_sha: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{7,40}$")] | None = None
    """the commit that runs, instead of a branch"""


class Training(Section):
    lr: float = Field(default=1e-6, gt=0, le=1)
    """the highest learning rate"""
    total_epochs: int = Field(default=1, ge=1, le=10_000)
    """how often each row of the dataset is taken, unless `advanced.max_steps` is given"""
    n_samples_per_prompt: int = Field(default=8, ge=1, le=1024)
    """samples of a group; their grades must fit into an event: 136, fewer with reward functions"""
    rollout_batch_size: int = Field(default=32, ge=1, le=1_000_000)
    """groups of a step; they must fit into an event: 121 with 8 samples each"""
    max_prompt_length: int = Field(default=8192, ge=1, le=262_144)
    """tokens; a longer prompt fails its sample, nothing is cut"""
    max_response_length: int = Field(default=8192, ge=1, le=262_144)
    """tokens that a sample may generate"""
    agent_workflow_timeout_s: float = Field(default=450, ge=1, le=86_400)
    """seconds that the workflow has for a sample"""
    grader_timeout_s: float = Field(default=150, ge=1, le=86_400)
    """seconds that the grader has for a group"""


class Sampling(Section):
    rollout_temperature: float = Field(default=1.0, ge=0, le=2)
    """divides the logits, in the sampler and in the learner"""
    rollout_top_p: float = Field(default=1.0, ge=0, le=1)
    """1.0 in training: another value is refused, for it would bias every ratio"""


class Checkpoints(Section):
    eval_interval: int | None = Field(default=None, ge=1, le=1_000_000)
    """steps between validations on `advanced.validation_dataset`; the first version and the last
    are validated anyway"""
    checkpoint_save_freq: int = Field(default=20, ge=1, le=1_000_000)
    """steps between checkpoints; the last step makes one anyway"""


class RewardWeight(Section):
    """A reward function of the rollout and its weight in the sum."""

    name: Annotated[str, StringConstraints(min_length=1)]
    """a function of the rollout that is marked with `@reward`"""
    weight: float = Field(default=1.0)
    """what its value is multiplied with"""


class Advanced(Section):
    """Everything of ours. A key that is left out has its algorithm's own default."""

    algorithm: Algorithm = "grpo"
    """the objective ([algorithms](algorithms.md))"""
    execution_mode: ExecutionMode = "sync"
    """whether sampling runs ahead of training ([architecture](architecture.md))"""
    max_steps_off_policy: int | None = Field(default=None, ge=0, le=64)
    """by how many steps; default: what the mode says, 4 for `fully_async`"""
    weight_sync_interval: int = Field(default=1, ge=1, le=64)
    """policy versions between those that samplers take"""
    max_steps: int | None = Field(default=None, ge=1, le=10_000_000)
    """steps of the run, instead of epochs"""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """of everything random: order of the rows, first values, samples"""
    deterministic: bool = False
    """the same run again has the same bits; costs speed"""
    date: Day | None = None
    """the day, as `"2026-11-22"`, that a chat template which asks for the time is told; default: the
    day of the submit"""
    tuning: Literal["lora", "full"] = "lora"
    """what is trained: an adapter, or all weights"""
    lora_rank: int = Field(default=16, ge=1, le=512)
    """rank of the adapter"""
    lora_alpha: float = Field(default=32.0, gt=0, le=4096)
    """the adapter is scaled by this over its rank"""
    lora_targets: str | tuple[str, ...] = Field(default="all-linear")
    """`all-linear`, or the names of the linear layers that get one"""
    kl_coef: float | None = Field(default=None, ge=0, le=10)
    """weight of the KL to the base model"""
    clip_low: float | None = Field(default=None, gt=0, le=10)
    """how far below 1 the ratio counts"""
    clip_high: float | None = Field(default=None, gt=0, le=10)
    """how far above 1 the ratio counts"""
    loss_aggregation: LossAggregation | None = None
    """over what the mean of the loss is taken"""
    clip_delta: float | None = Field(default=None, gt=1, le=1000)
    """bounds the ratio where the advantage is negative"""
    kl_estimator: KlEstimator | None = None
    """which estimate of the KL"""
    kl_in: KlPlace | None = None
    """whether it is part of the loss or of the reward"""
    correction: Correction = "ratio"
    """how off-policy samples are corrected for"""
    correction_level: CorrectionLevel | None = None
    """over what the weight of the correction is taken"""
    correction_low: float | None = Field(default=None, ge=0, le=1)
    """smaller weights are masked"""
    correction_high: float | None = Field(default=None, ge=1, le=1000)
    """larger weights are truncated or masked"""
    off_policy_threshold: float | None = Field(default=None, gt=0, le=100)
    """a bad sequence is left out whose mean log(mu / pi) is larger"""
    updates_per_step: int = Field(default=1, ge=1, le=64)
    """optimizer updates on each batch"""
    filter_groups: bool | None = None
    """drop groups whose rewards are all equal, and ask for others"""
    max_replacements: int | None = Field(default=None, ge=0, le=64)
    """how often a dropped group is replaced"""
    overlong_buffer: int | None = Field(default=None, ge=0, le=262_144)
    """tokens before the limit from which on a long answer is penalised"""
    overlong_penalty: float | None = Field(default=None, ge=0, le=1000)
    """the largest such penalty"""
    group_baseline: bool | None = None
    """take the group's mean off before whitening"""
    gamma: float | None = Field(default=None, gt=0, le=1)
    """discount of later rewards"""
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """lambda of generalised advantage estimation"""
    value_clip: float | None = Field(default=None, gt=0, le=1000)
    """how far a value may move in a step"""
    value_coef: float | None = Field(default=None, gt=0, le=100)
    """weight of the value loss"""
    critic_lr: float | None = Field(default=None, gt=0, le=1)
    """the critic's learning rate"""
    grad_clip: float = Field(default=1.0, gt=0, le=1e6)
    """the largest norm of the gradients; larger ones are scaled down"""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """of AdamW; norms and biases have none"""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """of AdamW"""
    adam_beta2: float | None = Field(default=None, ge=0, lt=1)
    """of AdamW; default: 0.95, for `sft` 0.98"""
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000)
    """steps in which the learning rate rises"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """how it falls afterwards"""
    lr_min_ratio: float = Field(default=0.0, ge=0, le=1)
    """to what share of `training.lr`"""
    micro_batch_tokens: int | None = Field(default=None, ge=16, le=10_000_000)
    """tokens of a pass of the learner, 4096 by default ([models](models.md))"""
    precision: Precision = "float32"
    """in which the base model is held and computed with ([models](models.md))"""
    recompute: bool = False
    """keep less of a pass and compute it again ([models](models.md))"""
    compile: bool = False
    """`torch.compile`, on a GPU ([models](models.md))"""
    rewards: tuple[RewardWeight, ...] = Field(default=())
    """reward functions to add up, instead of a Grader: `[[advanced.rewards]]` with `name` and
    `weight`"""
    validation_dataset: str | None = None
    """a registered dataset that is held out"""
    validation_samples: int = Field(default=1, ge=1, le=1024)
    """samples of each of its rows"""
    validation_temperature: float = Field(default=0.0, ge=0, le=2)
    """0 is greedy"""
    loss_turns: LossTurns | None = None
    """which turns of a conversation are learned"""
    batch_size: int = Field(default=16, ge=1, le=65_536)
    """`sft`: rows of a step"""
    max_sequence_length: int = Field(default=2048, ge=8, le=262_144)
    """`sft`: tokens of a row; a longer one is cut at its end"""
    state_interval: int | None = Field(default=None, ge=1, le=10_000)
    """steps between versions that are stored whole, for recovery; default: 1, more for large
    models"""


class Secrets(Section):
    required: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")], ...] = Field(
        default=()
    )
    """not built yet: refused"""


EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Z_][A-Z0-9_]*$")]


class RunConfig(Section):
    """A whole training TOML."""

    experiment: Experiment
    training: Training = Training()
    sampling: Sampling = Sampling()
    checkpoints: Checkpoints = Checkpoints()
    advanced: Advanced = Advanced()
    env: dict[EnvName, str] = {}
    """variables for user code, by name; what begins with HEADRACE_, LD_ or PYTHON is refused, and so are
    PATH, HOME and GLIBC_TUNABLES"""
    secrets: Secrets = Secrets()


class Evaluation(Section):
    limit: int | None = Field(default=None, ge=1)
    """the first so many rows; default: a tenth of all, drawn from the seed"""
    n: int = Field(default=1, ge=1, le=1024)
    """samples of a row, as many as `training.n_samples_per_prompt` may be"""
    batch_size: int = Field(default=1, ge=1, le=10_000)
    """rows that are asked for at once"""
    pass_threshold: float = Field(default=1.0)
    """a sample passes whose reward is at least this"""
    agent_workflow_timeout_s: float = Field(default=450, ge=1, le=86_400)
    """seconds that the workflow has for a sample"""
    grader_timeout_s: float = Field(default=150, ge=1, le=86_400)
    """seconds that the grader has for a row"""


class EvalAdvanced(Section):
    seed: int = Field(default=0, ge=0, lt=2**31)
    """of the rows and the samples"""
    deterministic: bool = False
    """the same evaluation again has the same bits; costs speed"""
    date: Day | None = None
    """as in training"""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """0 is greedy"""
    max_prompt_length: int = Field(default=8192, ge=1, le=262_144)
    """tokens; a longer prompt fails its sample, nothing is cut"""
    max_response_length: int = Field(default=8192, ge=1, le=262_144)
    """tokens that a sample may generate"""
    rewards: tuple[RewardWeight, ...] = Field(default=())
    """as in training"""


class EvalConfig(Section):
    """A whole evaluation TOML."""

    experiment: Experiment
    evaluation: Evaluation = Evaluation()
    advanced: EvalAdvanced = EvalAdvanced()
    env: dict[EnvName, str] = {}
    """variables for user code, by name; what begins with HEADRACE_, LD_ or PYTHON is refused, and so are
    PATH, HOME and GLIBC_TUNABLES"""
    secrets: Secrets = Secrets()
