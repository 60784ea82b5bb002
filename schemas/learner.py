"""What the learner is asked and what it answers: the port between `consumers/learn/consumer.py` and
trainer.

Weights and optimizer state cross as safetensors bytes, so that storing them, hashing them and
handing them to another process are the same thing. Nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from schemas.config import RunConfig
from schemas.sampling import Day, ModelRef, SampleRecord

RULES = 2
"""What a step computes from its batch, by number. A run keeps the rules that it began with
(`TrainSpec.rules`): an upgrade changes neither a run that is under way nor what verifies its log.

1: a group that shares its prompt is one pass, whatever `micro_batch_tokens` says; the answers of a
   conversation are encoded each by itself; weight decay takes every tensor; full tuning through
   Transformers does not train the embedding of the token that pads; REINFORCE++ with a group baseline
   has its KL in the reward (k1) by default.
2: no pass is larger than `micro_batch_tokens`, unless it is one sample; answers have the ids that they
   have in the whole conversation; weight decay leaves norms and biases alone; every embedding is
   trained; REINFORCE++ with a group baseline has its KL in the loss (k2) by default.
"""


@dataclass(frozen=True, slots=True)
class LearnerJob:
    """What stays the same over all steps of a run. `date`: what chat templates take for today."""

    run: str
    config: RunConfig
    model: ModelRef
    total_steps: int
    rules: int = RULES
    date: Day | None = None


@dataclass(frozen=True, slots=True)
class GradedGroup:
    """One group of a batch, samples and rewards in the order of the sample index.

    A reward of None stays out of the baseline and gets advantage 0.
    """

    slot: int
    samples: tuple[SampleRecord, ...]
    rewards: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One SFT row: the messages; the last one is the assistant's answer that is learned."""

    row: int
    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The batch of one step: groups in slot order (RL) or conversations in row order (SFT)."""

    step: int
    groups: tuple[GradedGroup, ...] = ()
    conversations: tuple[Conversation, ...] = ()


@dataclass(frozen=True, slots=True)
class LearnerState:
    """A policy version as bytes. `state` holds what resume needs beyond the weights: Adam's
    moments, step, RNG; with full tuning and LoRA alike `weights` are the trained tensors."""

    step: int
    weights: bytes
    weights_sha256: str
    state: bytes | None
    state_sha256: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step made.

    `metrics` maps metric keys (`train/loss`, ...) to finite values. `plan` is the micro-batch
    plan: the token count of each micro-batch, in order (other plans give other bits). `versions`: what
    bits depend on beside seed, data and plan. `files` (from `initialize` only) are the files that,
    beside the weights, make a checkpoint directory loadable by plain Transformers and PEFT: config,
    tokenizer, adapter config, an unnamed base model. `weights_name` is the file name of the weights
    there.
    """

    state: LearnerState
    metrics: dict[str, float]
    plan: tuple[int, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    weights_name: str = "adapter_model.safetensors"


class Learner(Protocol):
    """Takes optimizer steps. One call at a time per run; deterministic in its arguments."""

    async def initialize(self, job: LearnerJob) -> StepResult:
        """Build version 0 (step 0): base weights from the model reference, fresh LoRA and optimizer
        from the seed. Raises Refused when the model cannot be loaded."""
        ...

    def holds(self, job: LearnerJob, step: int, weights_sha256: str, state_sha256: str) -> bool:
        """Whether version `step` of this run, with these bits, is loaded and can be stepped from."""
        ...

    async def load(self, job: LearnerJob, state: LearnerState) -> None:
        """Load a version. Raises CorruptData when the tensors do not fit the model."""
        ...

    async def evaluate(
        self, job: LearnerJob, step: int, conversations: Sequence[Conversation]
    ) -> dict[str, float]:
        """The held-out loss of the loaded version `step`, by metric key. It changes nothing. Raises
        TransientError when that version is not loaded."""
        ...

    async def step(self, job: LearnerJob, batch: StepBatch, *, export_state: bool) -> StepResult:
        """One optimizer step from the loaded version `batch.step - 1`. `state` is None in the result
        unless `export_state`; `state_sha256` is always set."""
        ...
