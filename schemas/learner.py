"""The learner's port, between `consumers/learn/consumer.py` and the trainer: its arguments and results.

Weights and optimizer state are passed as safetensors bytes, so that the same bytes are stored, hashed
and sent to another process. Nothing here imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from schemas.config import RunConfig
from schemas.errors import HeadraceError
from schemas.models.teacher import TeacherRef
from schemas.sampling import (
    Day,
    Message,
    ModelRef,
    PolicyRef,
    RewardedTurn,
    SampleRecord,
    ToolSpec,
)

RULES = 7
"""The number of the current rules, which say what a step computes from its batch. A run keeps the rules
that it started with (`TrainSpec.rules`), so that an upgrade changes neither a running run nor the
verification of its log.

1: a group that shares its prompt is one pass, whatever `micro_batch_tokens` says; the answers of a
   conversation are encoded separately; weight decay applies to every tensor; full tuning through
   Transformers does not train the embedding of the padding token; REINFORCE++ with a group baseline
   has its KL in the reward (k1) by default.
2: no pass is larger than `micro_batch_tokens`, unless it is one sample; answers have the ids that they
   have in the whole conversation; weight decay does not apply to norms and biases; every embedding is
   trained; REINFORCE++ with a group baseline has its KL in the loss (k2) by default.
3: the soft overlong penalty counts all tokens that the policy generated in a sample, not those of its
   longest answer.
4: a CUDA GPU computes 64 million logits at a time instead of 4 million.
5: `compile` compiles the attention of a CUDA GPU too.
6: the rows of a group share all that they begin with, and not only equal contexts; the lean decoder
   computes more architectures, and layers with a window (`lean_since` in `schemas.models.families`);
   models that run through Transformers compute few logits at a time; groups without a gradient have no
   backward pass; tokens that no action is predicted from, such as the last one of an answer, are left
   out of the pass; on a CPU, adapters of a base of up to 1 GiB are trained in C, and not only those of
   a narrow base.
7: the hash of a version is a Merkle root over its tensors (`trainer/merkle_tree.py`), and not the
   SHA-256 of a file that holds them; the rows of a sample have the order of their tokens, and not that
   in which its requests arrived. What a step computes from its rows is that of rules 6.
"""


GGUF_VERSION = "gguf"
"""The key of a step's versions with the sha256 of the GGUF file that the base model was read from. A
model of another kind has none."""

TEACHER_VERSION = "teacher"
"""The key of a step's versions with the sha256 of the teacher that the run learns from."""


RefutingTest = Literal["distance", "draws", "server"]
"""The test by which a sample was refuted."""


@dataclass(frozen=True, slots=True)
class LearnerJob:
    """The settings that stay the same over all steps of a run. `date` is the current date as chat
    templates see it. `teacher` is the model that the run learns from, if it distils and is not its own
    teacher."""

    run: str
    config: RunConfig
    model: ModelRef
    total_steps: int
    rules: int = RULES
    date: Day | None = None
    teacher: TeacherRef | None = None


@dataclass(frozen=True, slots=True)
class GradedGroup:
    """One group of a batch, with samples and rewards in the order of the sample index.

    A reward of None is left out of the baseline and gets advantage 0. `parts` are the parts of the
    rewards by name, if the run's algorithm compares them. `hint` is what the teacher reads behind the
    prompt, if the run has one. `teacher_tokens` are the texts that a teacher on a server has for tokens,
    by id.
    """

    slot: int
    samples: tuple[SampleRecord, ...]
    rewards: tuple[float | None, ...]
    parts: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    hint: str | None = None
    teacher_tokens: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One SFT row. The last of its messages is the assistant's answer that is learned. A message may be
    a pair of its role and its content. `tools` are those that it offers."""

    row: int
    messages: tuple[Message | tuple[str, str], ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Preference:
    """One row of preferences: a prompt with a better or desirable answer (`chosen`), a worse or
    undesirable one (`rejected`), or both. `margin` is by how much the rewards of both should differ, for
    a reward model. Messages are as in Conversation."""

    row: int
    prompt: tuple[Message | tuple[str, str], ...]
    chosen: str | None = None
    rejected: str | None = None
    margin: float | None = None
    tools: tuple[ToolSpec, ...] = ()


LearnedRow = Conversation | Preference


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The batch of one step: groups in slot order (RL), or the dataset's rows in row order, as
    conversations (SFT) or preferences. If it `attests`, the samples are tested first. `sampled` is the
    version that made them, if that is not the one that the step starts from."""

    step: int
    groups: tuple[GradedGroup, ...] = ()
    conversations: tuple[Conversation, ...] = ()
    preferences: tuple[Preference, ...] = ()
    attests: bool = False
    sampled: PolicyRef | None = None


@dataclass(frozen=True, slots=True)
class Refutation:
    """A sample that does not come from the version that the log names. `server` is the address of the
    one that made it. `test` is the test that failed: `distance` and `draws` are about this sample, and
    `server` is about all samples of its server in the step (`trainer/objective/attestation.py`). The
    log of the e-value was at most `log_e`, and reached its limit after `tokens` tokens. `distance` is
    the mean absolute difference of the logprobs, in nats."""

    slot: int
    index: int
    server: str
    test: RefutingTest
    tokens: int
    log_e: float
    distance: float


class SamplesRefuted(HeadraceError):
    """Some samples of a batch do not come from the version that the log names, so the step was not
    taken. The loaded version did not change."""

    def __init__(self, refutations: tuple[Refutation, ...]) -> None:
        super().__init__(f"{len(refutations)} samples were refuted, the first: {refutations[0]}")
        self.refutations = refutations


@dataclass(frozen=True, slots=True)
class LearnerState:
    """A policy version, and its bytes where they are needed. `weights` are the trained tensors, with
    LoRA and with full tuning. `state` holds what a resume needs in addition: the optimizer's moments
    and step counts, and for PPO also the critic. Both are safetensors files, or None.

    `weights_sha256` and `state_sha256` are the hash of the version: Merkle roots over its tensors, and
    before rules 7 the SHA-256 of both files. The hashes of the files are set where the files are.
    """

    step: int
    weights: bytes | None
    weights_sha256: str
    state: bytes | None
    state_sha256: str
    weights_file_sha256: str | None = None
    state_file_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step.

    `metrics` maps metric keys (`train/loss`, ...) to finite values. `plan` is the micro-batch plan:
    the number of tokens of each micro-batch, in order (another plan gives other bits). `versions`
    are the library versions on which the bits depend, besides seed, data and plan. `files` (only
    from `initialize`) are the files that, together with the weights, make a checkpoint directory
    that plain Transformers and PEFT can load: the config, the tokenizer, the adapter config, and a
    base model without a public name. `weights_name` is the file name of the weights in it.
    """

    state: LearnerState
    metrics: dict[str, float]
    plan: tuple[int, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    weights_name: str = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class GradientComparison:
    """Two policy gradients of one version, on the same samples with different rewards. `cosine` is that
    of the angle between them, None if one is 0. `turned` of the `advantages` samples whose advantage is
    not 0 with both rewards have one with another sign."""

    cosine: float | None
    norm_before: float
    norm_after: float
    advantages: int
    turned: int


class Learner(Protocol):
    """Takes optimizer steps. It handles one call at a time per run, and it is deterministic in its
    arguments."""

    async def initialize(self, job: LearnerJob) -> StepResult:
        """Build version 0 (step 0): base weights from the model reference, and a fresh LoRA adapter
        and optimizer from the seed. Raises Refused when the model cannot be loaded."""
        ...

    def holds(self, job: LearnerJob, step: int, weights_sha256: str, state_sha256: str) -> bool:
        """Whether version `step` of this run, with exactly these bits, is loaded and can take a step."""
        ...

    async def load(self, job: LearnerJob, state: LearnerState) -> None:
        """Load a version. Raises CorruptData when the tensors do not fit the model."""
        ...

    async def evaluate(
        self, job: LearnerJob, step: int, rows: Sequence[LearnedRow]
    ) -> dict[str, float]:
        """How the loaded version `step` does on held-out rows, by metric key. It changes nothing. Raises
        TransientError when that version is not loaded."""
        ...

    async def compare_gradients(
        self, job: LearnerJob, before: StepBatch, after: StepBatch
    ) -> GradientComparison:
        """Compare the policy gradients of two batches, which differ in their rewards, at the loaded
        version `before.step - 1`. It changes nothing. Raises TransientError when that version is not
        loaded, and Refused for an algorithm that does not learn from the rewards of samples."""
        ...

    async def step(
        self,
        job: LearnerJob,
        batch: StepBatch,
        *,
        export_state: bool,
        export_weights: bool = True,
    ) -> StepResult:
        """Take one optimizer step from the loaded version `batch.step - 1`. The bytes of weights and
        state are in the result only if they are exported. The hash of the version always is. Raises
        SamplesRefuted if the batch attests its samples and one of them fails; the version then stays
        loaded as it was."""
        ...


def turn_numbers(record: SampleRecord) -> tuple[int, ...]:
    """The number of each turn that a sample records, 0 for that of its first request."""
    return tuple(
        place if turn.number is None else turn.number for place, turn in enumerate(record.turns)
    )


def numbered_turns(record: SampleRecord) -> dict[int, RewardedTurn]:
    """The turns of a sample by their numbers, in the order of their requests, which is not that of the
    rows where a request does not go on from the one before it. Empty if it records no turns."""
    return dict(
        sorted(zip(turn_numbers(record), record.turns, strict=True), key=lambda one: one[0])
    )


def requested_rows(record: SampleRecord) -> tuple[int, ...]:
    """The numbers of the rows of a sample, in the order of their first requests."""
    rows = dict.fromkeys(turn.row for turn in numbered_turns(record).values())
    return (*rows, *(row for row in range(len(record.sequences)) if row not in rows))
