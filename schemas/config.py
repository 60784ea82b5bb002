"""The run and evaluation TOML: sections, keys, bounds and defaults.

The whole file is checked strictly. An unknown section or key is refused with a suggestion.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from schemas.costs.budget import Budget, BudgetTable
from schemas.datasets import Curriculum, is_none
from schemas.deployments import DeploymentName
from schemas.models.reward_model import RewardModelTables
from schemas.network import MOST_ADDRESSES
from schemas.sampling import Day, LoraScaling, Precision

Algorithm = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "luspo",
    "gmpo",
    "cispo",
    "sapo",
    "dppo",
    "clip_cov",
    "kl_cov",
    "gpg",
    "gdpo",
    "maxrl",
    "rloo",
    "reinforce_plus_plus",
    "ppo",
    "importance_sampling",
    "online_dpo",
    "sft",
    "dpo",
    "kto",
    "orpo",
    "simpo",
    "distill",
    "reward_model",
]
ExecutionMode = Literal["sync", "one_step_off_async", "fully_async", "offline"]
LossAggregation = Literal["token_mean", "sequence_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
Divergence = Literal["tv", "kl"]
KlPlace = Literal["loss", "reward"]
Correction = Literal["ratio", "decoupled", "truncated", "masked"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
LossTurns = Literal["assistant", "last", "all"]
PreferenceLoss = Literal["sigmoid", "sigmoid_norm", "ipo", "hinge"]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
ProjectKey = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
NonEmpty = Annotated[str, StringConstraints(min_length=1, pattern=r"^\S+$")]
SecretName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$", max_length=64)]
ServerUrl = Annotated[str, StringConstraints(min_length=1, max_length=500)]

MOST_RUBRICS, LONGEST_RUBRIC = 16, 4000
"""The most rubrics of a run, and the most characters in the criteria of one."""
Instruction = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_RUBRIC)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Experiment(Section):
    """`rollout` and `entrypoint` are required, except in runs that sample nothing."""

    rollout: Name | None = None
    """the directory under `rollouts/` whose code runs"""
    entrypoint: str | None = None
    """the file in it with the AgentWorkflow and the Grader, for example `main.py`"""
    model_path: Annotated[str, StringConstraints(min_length=1)]
    """`scratch:NAME`, a Hugging Face id, an absolute directory or `.gguf` file, or `RUN@STEP`
    (`RUN@last`); in an evaluation also `provider:NAME`
    ([evaluations](evaluations.md#a-providers-model))"""
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
    """how often each row of the dataset is used, unless `advanced.max_steps` is set"""
    n_samples_per_prompt: int = Field(default=8, ge=1, le=1024)
    """samples in a group; at most 136, and fewer with reward functions, because their grades must fit
    into one event"""
    rollout_batch_size: int = Field(default=32, ge=1, le=1_000_000)
    """groups in a step; at most 121 with 8 samples each, because they must fit into one event"""
    max_prompt_length: int = Field(default=8192, ge=1, le=262_144)
    """the most tokens in a prompt; a sample with a longer prompt fails, nothing is cut off"""
    max_response_length: int = Field(default=8192, ge=1, le=262_144)
    """the most tokens that the policy may generate in a sample, in all its answers together"""
    max_answer_length: int | None = Field(default=None, ge=1, le=262_144)
    """the most tokens of one answer; default: `max_response_length`"""
    agent_workflow_timeout_s: float = Field(default=450, ge=1, le=86_400)
    """the most seconds that the workflow may take for a sample, its waits for the policy included"""
    grader_timeout_s: float = Field(default=150, ge=1, le=86_400)
    """the most seconds that the grader may take for a group"""


class Sampling(Section):
    rollout_temperature: float = Field(default=1.0, ge=0, le=2)
    """the logits are divided by it, in the sampler and in the learner; at least 0.01 in training"""
    rollout_top_p: float = Field(default=1.0, ge=0, le=1)
    """must be 1.0 in training, because any other value would bias every ratio"""


class Checkpoints(Section):
    eval_interval: int | None = Field(default=None, ge=1, le=1_000_000)
    """steps between validations on `advanced.validation_dataset`; the first and the last version are
    always validated"""
    checkpoint_save_freq: int = Field(default=20, ge=1, le=1_000_000)
    """steps between checkpoints; the last step always makes one"""


class RewardWeight(Section):
    """A reward function of the rollout and its weight in the sum."""

    name: Annotated[str, StringConstraints(min_length=1)]
    """a function of the rollout that is marked with `@reward`"""
    weight: float = Field(default=1.0)
    """its value is multiplied by this"""


class RubricWeight(Section):
    """Criteria by which a model scores each answer, and their weight in the reward."""

    text: Instruction
    """the criteria, in words"""
    model: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    """the judge: PROVIDER/MODEL, or with `base_url` the name of a model there"""
    weight: float = Field(default=1.0)
    """the score is multiplied by this"""
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$")] | None = None
    """the name of the score in metrics and samples; default: `rubric_1`, `rubric_2` and so on"""
    scale: tuple[float, float] = (0.0, 1.0)
    """the lowest and the highest score"""
    scope: Literal["sample", "group"] | None = Field(default=None, exclude_if=is_none)
    """`group`: one question about all answers of a group; default: `sample`"""
    base_url: Annotated[str, StringConstraints(min_length=1, max_length=500)] | None = None
    """an OpenAI-compatible server, instead of a provider"""
    api_key_secret: SecretName | None = None
    """the name of the secret with the key; default: that of the provider, such as OPENAI_API_KEY"""
    usd_per_million: tuple[float, float] | None = None
    """the price of a million tokens of prompts and of answers"""


FailedReward = Annotated[float, Field(ge=-1e6, le=1e6)] | Literal["drop", "grade"]
"""The use of a sample that failed because of what the policy wrote: it gets this reward, it is left
out, or the grader scores it."""


class FailedRewards(Section):
    """`advanced.failed_reward` for one category of failures."""

    agent_error: FailedReward | None = None
    """the workflow raised or ended its process, also at a limit of turns or tokens"""
    timeout: FailedReward | None = None
    """the workflow took too long"""
    prompt_too_long: FailedReward | None = None
    """the conversation grew too long for the policy"""


class Advanced(Section):
    """Everything else. A key that is left out has the default of the run's algorithm."""

    algorithm: Algorithm = "grpo"
    """the objective ([algorithms](algorithms.md))"""
    execution_mode: ExecutionMode = "sync"
    """how sampling and training take turns ([architecture](architecture.md#execution-modes))"""
    max_steps_off_policy: int | None = Field(default=None, ge=0, le=64)
    """how many steps sampling may run ahead; default: the mode's own value, 4 for `fully_async`"""
    weight_sync_interval: int = Field(default=1, ge=1, le=64)
    """samplers load new weights after this many policy versions"""
    max_steps: int | None = Field(default=None, ge=1, le=10_000_000)
    """steps in the run, instead of epochs"""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """seed of everything random: the order of rows, the initial weights and the samples"""
    deterministic: bool = False
    """repeating the run gives identical bits; this costs speed"""
    allow_divergence: bool = False
    """go on, and record the divergence, when a repeated step gives other bits on other hardware or
    software ([runbook](runbook.md#10-a-run-ends-with-replay_diverged))"""
    priority: int = Field(default=1, ge=1, le=100)
    """the share of this run where runs take turns: one with 2 gets twice the work of one with 1"""
    date: Day | None = None
    """the current date for chat templates that ask, as `"2026-11-22"`; default: that of submit"""
    tuning: Literal["lora", "full"] = "lora"
    """what is trained: a LoRA adapter, or all weights"""
    lora_rank: int = Field(default=16, ge=1, le=512)
    """the adapter's rank"""
    lora_alpha: float = Field(default=32.0, gt=0, le=4096)
    """the adapter's output is scaled by `lora_alpha / lora_rank`"""
    lora_scaling: LoraScaling | None = Field(default=None, exclude_if=is_none)
    """`rank_stabilized`: it is scaled by `lora_alpha / sqrt(lora_rank)` instead
    ([algorithms](algorithms.md#adapters)); default: `standard`"""
    lora_variant: Literal["lora", "dora"] | None = Field(default=None, exclude_if=is_none)
    """`dora`: the length of each row of a weight is trained apart from its direction
    ([algorithms](algorithms.md#adapters)); default: `lora`"""
    lora_targets: str | tuple[str, ...] = Field(default="all-linear")
    """`all-linear`, or the names of the linear layers that get an adapter"""
    kl_coef: float | None = Field(default=None, ge=0, le=10)
    """weight of the KL divergence from the base model"""
    clip_low: float | None = Field(default=None, gt=0, le=10)
    """how far below 1 the ratio may be before it is clipped"""
    clip_high: float | None = Field(default=None, gt=0, le=10)
    """how far above 1 the ratio may be before it is clipped"""
    divergence: Divergence | None = None
    """how DPPO measures how far two policies are apart: total variation or KL"""
    tau_pos: float | None = Field(default=None, gt=0, le=100)
    """how soon SAPO's gradient fades where the advantage is positive"""
    tau_neg: float | None = Field(default=None, gt=0, le=100)
    """how soon SAPO's gradient fades where it is not"""
    cov_ratio: float | None = Field(default=None, gt=0, le=1, exclude_if=is_none)
    """the share of all actions of a step that Clip-Cov or KL-Cov chooses"""
    cov_low: float | None = Field(default=None, ge=0, le=1e6, exclude_if=is_none)
    """Clip-Cov chooses among actions with a larger covariance"""
    cov_high: float | None = Field(default=None, gt=0, le=1e6, exclude_if=is_none)
    """Clip-Cov chooses among actions with a smaller covariance"""
    cov_kl_coef: float | None = Field(default=None, gt=0, le=1000, exclude_if=is_none)
    """weight of the penalty that KL-Cov puts on the actions that it chooses"""
    loss_aggregation: LossAggregation | None = None
    """what the loss is averaged over ([algorithms](algorithms.md#aggregation))"""
    clip_delta: float | None = Field(default=None, gt=1, le=1000)
    """upper bound of the ratio where the advantage is negative (dual clip)"""
    kl_estimator: KlEstimator | None = None
    """which estimator of the KL divergence is used"""
    entropy_coef: float | None = Field(default=None, ge=0, le=10, exclude_if=is_none)
    """weight of the entropy bonus ([algorithms](algorithms.md#entropy-bonus)); with `entropy_target`
    the weight at the beginning"""
    entropy_target: float | None = Field(default=None, gt=0, le=100, exclude_if=is_none)
    """the entropy, in nats, below which the bonus is on and its weight grows"""
    entropy_coef_delta: float | None = Field(default=None, gt=0, le=10, exclude_if=is_none)
    """how much the weight of the bonus changes in a step"""
    entropy_coef_max: float | None = Field(default=None, gt=0, le=10, exclude_if=is_none)
    """the largest weight of the bonus"""
    kl_in: KlPlace | None = None
    """whether the KL divergence is added to the loss or to the reward"""
    correction: Correction = "ratio"
    """how the loss corrects for off-policy samples ([algorithms](algorithms.md#corrections))"""
    correction_level: CorrectionLevel | None = None
    """whether a correction weight belongs to a token, a sequence or a sequence's geometric mean"""
    correction_low: float | None = Field(default=None, ge=0, le=1)
    """tokens or sequences with a smaller correction weight are masked"""
    correction_high: float | None = Field(default=None, ge=1, le=1000)
    """larger correction weights are truncated, or their tokens or sequences are masked"""
    off_policy_threshold: float | None = Field(default=None, gt=0, le=100)
    """a sequence with a negative advantage is masked when its mean log(mu / pi) is larger"""
    updates_per_step: int = Field(default=1, ge=1, le=64)
    """passes over each batch, each with one optimizer update, or with one for every mini-batch"""
    minibatch_size: int | None = Field(default=None, ge=1, le=1_000_000, exclude_if=is_none)
    """samples of one optimizer update, in whole groups; default: all samples of a step
    ([algorithms](algorithms.md#within-a-step))"""
    filter_groups: bool | None = None
    """drop groups whose rewards are all equal, and request other groups"""
    max_replacements: int | None = Field(default=None, ge=0, le=64)
    """how often a dropped group may be replaced"""
    curriculum: Curriculum | None = Field(default=None, exclude_if=is_none)
    """pools of rows by their pass rates, and oversampling: `[advanced.curriculum]`, below"""
    overlong_buffer: int | None = Field(default=None, ge=0, le=262_144)
    """how many tokens before `training.max_response_length` the penalty of a long sample begins"""
    overlong_penalty: float | None = Field(default=None, ge=0, le=1000)
    """the penalty of a sample that reaches `training.max_response_length`"""
    mask_truncated: bool | None = None
    """leave answers that were cut off at a limit of tokens out of the loss; they count in baselines"""
    mask_failed: bool | None = Field(default=None, exclude_if=is_none)
    """leave samples that the policy made fail out of the loss; the rewards that `failed_reward` gives
    them count in baselines"""
    failed_reward: FailedReward | None = None
    """the use of a sample that the policy made fail: a number is its reward, `grade` lets the grader
    score it, and `drop`, the default, leaves it out ([rollouts](rollouts.md#failed-samples))"""
    failed_rewards: FailedRewards | None = None
    """the same for single categories of failures: `[advanced.failed_rewards]`"""
    group_baseline: bool | None = None
    """subtract the group's mean before whitening"""
    turn_reward_coef: float | None = Field(default=None, gt=0, le=1000, exclude_if=is_none)
    """how much the rewards of single turns count beside that of the sample
    ([algorithms](algorithms.md#rewards-of-turns))"""
    agent_advantages: bool | None = Field(default=None, exclude_if=is_none)
    """compare the answers of each agent of a sample with those of the same agent in other samples
    ([algorithms](algorithms.md#agents))"""
    gamma: float | None = Field(default=None, gt=0, le=1)
    """discount factor of later rewards"""
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """lambda of generalised advantage estimation"""
    value_clip: float | None = Field(default=None, gt=0, le=1000)
    """how far a value may change in a step before it is clipped"""
    value_coef: float | None = Field(default=None, gt=0, le=100)
    """weight of the value loss"""
    critic_lr: float | None = Field(default=None, gt=0, le=1)
    """the critic's learning rate"""
    grad_clip: float = Field(default=1.0, gt=0, le=1e6)
    """the largest norm of the gradients; larger gradients are scaled down to it"""
    optimizer: Literal["adamw", "muon"] | None = Field(default=None, exclude_if=is_none)
    """`muon`: Muon updates the matrices of linear layers and adapters, and AdamW the rest
    ([algorithms](algorithms.md#optimizers)); default: `adamw`"""
    muon_momentum: float | None = Field(default=None, ge=0, lt=1, exclude_if=is_none)
    """momentum of Muon; default: 0.95"""
    attest: bool | None = Field(default=None, exclude_if=is_none)
    """[test](attestation.md) whether samples come from the version of the log; default: true"""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """weight decay; norms and biases have none"""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """beta1 of AdamW"""
    adam_beta2: float | None = Field(default=None, ge=0, lt=1)
    """beta2 of AdamW; default: 0.95, and 0.98 where the answers of a dataset are learned"""
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000)
    """the first steps, in which the learning rate rises to `training.lr`"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """how the learning rate changes after these first steps"""
    lr_min_ratio: float = Field(default=0.0, ge=0, le=1)
    """the share of `training.lr` to which the learning rate falls"""
    micro_batch_tokens: int | None = Field(default=None, ge=16, le=10_000_000)
    """tokens in a pass of the learner, 4096 by default ([models](models.md))"""
    precision: Precision = "float32"
    """number format in which the base model is stored and computed ([models](models.md))"""
    recompute: bool = False
    """keep fewer activations in memory and compute them again ([models](models.md))"""
    compile: bool = False
    """use `torch.compile`, on a GPU ([models](models.md))"""
    rewards: tuple[RewardWeight, ...] = Field(default=())
    """reward functions whose weighted sum is the reward, instead of a Grader: `[[advanced.rewards]]`
    with `name` and `weight`"""
    max_turns: int | None = Field(default=None, ge=1, le=256)
    """the most turns (answers of the policy) of a sample; default: 10 in the built-in loop, else 256"""
    max_sample_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    """the most tokens of a sample in all turns, prompts included; shared tokens count once"""
    rubrics: tuple[RubricWeight, ...] = Field(default=(), max_length=MOST_RUBRICS)
    """criteria that judges score, added to the reward: `[[advanced.rubrics]]` with `text`, `model` and
    `weight` ([rewards](rewards.md#rubrics))"""
    reward_models: RewardModelTables = ()
    """reward models whose scores are added to the reward ([rewards](rewards.md#reward-models))"""
    judge_max_calls: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """the most requests to judges in the run"""
    judge_max_tokens: int | None = Field(default=None, ge=1)
    """the most tokens of judges in the run"""
    judge_max_usd: float | None = Field(default=None, gt=0, le=1e9)
    """the most US dollars for judges in the run"""
    network: tuple[str, ...] = Field(default=(), max_length=MOST_ADDRESSES)
    """addresses that the workflow may connect to, as `["api.example.com:443"]`; the operator must allow
    each of them ([rollouts](rollouts.md#the-network))"""
    validation_dataset: str | None = None
    """a registered dataset that is used for validation and not for training"""
    validation_samples: int = Field(default=1, ge=1, le=1024)
    """samples per row of the validation dataset"""
    validation_temperature: float = Field(default=0.0, ge=0, le=2)
    """temperature of validation samples; 0 is greedy, else at least 0.01"""
    deploy: Literal["best"] | None = None
    """`best`: when the run finishes, its checkpoint with the best held-out reward is
    [deployed](models.md#deploy), unless what is deployed under that name has a better one"""
    deploy_name: DeploymentName | None = None
    """the name of that deployment; default: the name of the rollout, else of the dataset"""
    project: ProjectKey | None = Field(default=None, exclude_if=is_none)
    """a label within the workspace, by which lists are narrowed; it changes nothing in the run"""
    loss_turns: LossTurns | None = None
    """which turns of a conversation are trained on"""
    preference_loss: PreferenceLoss | None = Field(default=None, exclude_if=is_none)
    """`dpo`, `online_dpo`: the loss of a pair of answers ([algorithms](algorithms.md))"""
    beta: float | None = Field(default=None, gt=0, le=100, exclude_if=is_none)
    """`dpo`, `online_dpo`, `kto`, `simpo`: how strongly rewards differ for a given change of the policy;
    `orpo`: the weight of the comparison"""
    label_smoothing: float | None = Field(default=None, ge=0, lt=0.5, exclude_if=is_none)
    """`dpo`, `online_dpo`: the share of pairs that are assumed to be the wrong way round"""
    simpo_gamma: float | None = Field(default=None, ge=0, le=100, exclude_if=is_none)
    """`simpo`: the margin that the rewards of a pair should have"""
    desirable_weight: float | None = Field(default=None, gt=0, le=1000, exclude_if=is_none)
    """`kto`: the weight of desirable answers"""
    undesirable_weight: float | None = Field(default=None, gt=0, le=1000, exclude_if=is_none)
    """`kto`: the weight of undesirable answers"""
    teacher: NonEmpty | None = Field(default=None, exclude_if=is_none)
    """`distill`: the model to learn from, like `experiment.model_path`, or `self`, or `provider:NAME`"""
    teacher_hint: Instruction | None = Field(default=None, exclude_if=is_none)
    """`distill`: text behind the prompt that only the teacher reads, with the `{ground_truth}`"""
    teacher_base_url: ServerUrl | None = Field(default=None, exclude_if=is_none)
    """`distill`: the vLLM server of a teacher `provider:NAME`, such as `https://10.0.0.5:8000/v1`"""
    teacher_api_key_secret: SecretName | None = Field(default=None, exclude_if=is_none)
    """`distill`: the name of the secret with the key of that server; default: no key is sent"""
    distill_beta: float | None = Field(default=None, ge=0, le=1, exclude_if=is_none)
    """`distill`: 1 is the reverse KL divergence, 0 the forward one, and between them is JSD"""
    center_rewards_coefficient: float | None = Field(default=None, gt=0, le=1, exclude_if=is_none)
    """`reward_model`: how strongly the two rewards of a pair are drawn to a sum of 0"""
    batch_size: int = Field(default=16, ge=1, le=65_536)
    """rows in a step, where the answers of a dataset are learned (`sft`, `dpo`, `kto`, `orpo`,
    `simpo`, `reward_model`)"""
    max_sequence_length: int = Field(default=2048, ge=8, le=262_144)
    """there, the most tokens in a row; a longer row is cut off at its end"""
    state_interval: int | None = Field(default=None, ge=1, le=10_000)
    """steps between versions that are stored whole, for recovery; default: 1, more for large models"""


class Secrets(Section):
    required: tuple[SecretName, ...] = Field(default=(), max_length=32)
    """names of [secrets](secrets.md) that workflow and grader get as environment variables"""


EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Z_][A-Z0-9_]*$")]


class RunConfig(Section):
    """A whole training TOML."""

    experiment: Experiment
    training: Training = Training()
    sampling: Sampling = Sampling()
    checkpoints: Checkpoints = Checkpoints()
    advanced: Advanced = Advanced()
    budget: BudgetTable = Budget()
    env: dict[EnvName, str] = {}
    """Environment variables for user code, by name. Names that begin with HEADRACE_, LD_ or PYTHON are
    refused, and so are PATH, HOME and GLIBC_TUNABLES"""
    secrets: Secrets = Secrets()

    @property
    def deploy_as(self) -> str | None:
        """The name under which the best checkpoint is deployed at the end; None for no deployment."""
        name = self.advanced.deploy_name or self.experiment.rollout or self.experiment.dataset
        return name if self.advanced.deploy else None


class Evaluation(Section):
    limit: int | None = Field(default=None, ge=1)
    """evaluate only this many rows, the first ones; default: a tenth of all rows, drawn from the seed"""
    n: int = Field(default=1, ge=1, le=1024)
    """samples per row; the limits of `training.n_samples_per_prompt` apply"""
    batch_size: int = Field(default=1, ge=1, le=10_000)
    """rows that are requested at once"""
    pass_threshold: float = Field(default=1.0)
    """a sample passes when its reward is at least this"""
    agent_workflow_timeout_s: float = Field(default=450, ge=1, le=86_400)
    """the most seconds that the workflow may take for a sample, its waits for the policy included"""
    grader_timeout_s: float = Field(default=150, ge=1, le=86_400)
    """the most seconds that the grader may take for a row"""


class EvalAdvanced(Section):
    seed: int = Field(default=0, ge=0, lt=2**31)
    """seed of the drawn rows and the samples"""
    deterministic: bool = False
    """repeating the evaluation gives identical bits; this costs speed"""
    date: Day | None = None
    """as in training"""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """temperature of the samples; 0 is greedy, else at least 0.01"""
    max_prompt_length: int = Field(default=8192, ge=1, le=262_144)
    """the most tokens in a prompt; a sample with a longer prompt fails, nothing is cut off"""
    max_response_length: int = Field(default=8192, ge=1, le=262_144)
    """as in training"""
    max_answer_length: int | None = Field(default=None, ge=1, le=262_144)
    """as in training"""
    rewards: tuple[RewardWeight, ...] = Field(default=())
    """as in training"""
    max_turns: int | None = Field(default=None, ge=1, le=256)
    """as in training"""
    max_sample_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    """as in training"""
    rubrics: tuple[RubricWeight, ...] = Field(default=(), max_length=MOST_RUBRICS)
    """as in training"""
    judge_max_calls: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """as in training"""
    judge_max_tokens: int | None = Field(default=None, ge=1)
    """as in training"""
    judge_max_usd: float | None = Field(default=None, gt=0, le=1e9)
    """as in training"""
    network: tuple[str, ...] = Field(default=(), max_length=MOST_ADDRESSES)
    """as in training"""
    base_url: ServerUrl | None = None
    """a provider's model: an OpenAI-compatible server, instead of a known provider"""
    api_key_secret: SecretName | None = None
    """a provider's model: the secret with the key; default: the provider's, such as OPENAI_API_KEY"""
    usd_per_million: tuple[float, float] | None = None
    """a provider's model: the price of a million tokens of prompts and of answers, in US dollars"""
    max_calls: int = Field(default=10_000, ge=1, le=10_000_000)
    """a provider's model: the most requests of the evaluation"""
    max_usd: float | None = Field(default=None, gt=0, le=1e6)
    """a provider's model: the most US dollars for the evaluation; it needs `usd_per_million`"""
    provider_timeout_s: float = Field(default=300, ge=1, le=3600)
    """a provider's model: the most seconds for one answer, with repeated requests"""
    project: ProjectKey | None = Field(default=None, exclude_if=is_none)
    """as in training"""


class EvalConfig(Section):
    """A whole evaluation TOML."""

    experiment: Experiment
    evaluation: Evaluation = Evaluation()
    advanced: EvalAdvanced = EvalAdvanced()
    env: dict[EnvName, str] = {}
    """Environment variables for user code, by name, as in training"""
    secrets: Secrets = Secrets()
