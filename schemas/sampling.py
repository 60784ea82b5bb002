"""What is sampled and how: the types that gateway, rollout, grader and engines share.

The engines (trainer) and the shell (infra, consumers) meet here and nowhere else. Token ids and
logprobs are recorded at the moment of sampling and never recomputed from text.

Legend: a *sequence* is one row of tokens for the learner; `loss_mask[t]` is 1 where the policy
itself chose token t, 0 for prompt, tool and observation tokens; `logprobs[t]` is the behaviour
policy's log-probability of token t after temperature (0.0 where the mask is 0).
"""

from datetime import date
from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from schemas.errors import FailureCategory

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _day(text: str) -> str:
    date.fromisoformat(text)
    return text


Day = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"), AfterValidator(_day)]
"""A day as `2026-11-22`."""

UNDATED: Day = "2024-07-26"
"""What a chat template takes for today where no day was recorded (runs of before): the day that the
templates of Llama 3 name themselves when they are given no clock."""


class Value(BaseModel):
    """A frozen value. Unknown fields are ignored: strict on write, tolerant on read."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class ArtifactRef(Value):
    """A claim check: where bytes are, and how to know that they are the right ones."""

    uri: str
    sha256: Sha256
    size: int = Field(ge=0)


class Message(Value):
    """One chat message, as the chat template sees it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


Precision = Literal["float32", "bfloat16"]


class ModelRef(Value):
    """Which base model: enough to build the same weights again, anywhere.

    scratch: `name` is a shape that ships with Headrace, initialised from `seed`.
    directory, hub: `name` is the path or the hub id.
    checkpoint: `name` is `<run id>@<step>`, `files` the checkpoint's files by name: with full tuning
    config.json, model.safetensors and the tokenizer's; with LoRA adapter_config.json,
    adapter_model.safetensors and, where the base has no public name, the base model under base/.
    `dtype` is what its weights are held in; what is trained on top of them is float32 always.
    """

    kind: Literal["scratch", "directory", "hub", "checkpoint"]
    name: str
    seed: int = 0
    dtype: Precision = "float32"
    files: dict[str, ArtifactRef] = {}


class PolicyRef(Value):
    """A policy version of a run: the base model plus the trained weights, if any were trained.

    `weights` is a safetensors artifact: the LoRA adapter, or with full tuning all weights.
    None means the base model as it is (evaluation of a plain model).
    """

    version: int = Field(ge=0)
    weights: ArtifactRef | None = None


class SamplingParams(Value):
    """How tokens are drawn. temperature 0 is greedy. `seed` is the run's seed. `date`: what a chat
    template that asks for the time takes for today, for a prompt must not depend on when it is made."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_prompt_tokens: int = Field(default=8192, ge=1)
    max_new_tokens: int = Field(default=8192, ge=1)
    stop: tuple[str, ...] = ()
    seed: int = 0
    deterministic: bool = False
    date: Day | None = None


class DrawKey(Value):
    """Where in the run a sample stands: with the prompt's hash, its occurrence and the completion
    position this keys the counter-based generator, so no draw depends on batch mates or timing."""

    purpose: str
    step: int
    slot: int
    replacement: int
    sample: int


class Turn(Value):
    """One exact exchange with the engine: ids in, ids and logprobs out. `alarm`: what is wrong with
    servers that the engine has fenced, if it has; nothing of this turn comes from them. `pieces`, where
    the request asked for them: the UTF-8 bytes of each completion id; None for an id that is not part
    of the text (a special token, or what a stop string cut off)."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    alarm: str | None = None
    pieces: tuple[tuple[int, ...] | None, ...] | None = None


class SampleRequest(Value):
    """One completion to sample.

    `messages` is the whole conversation. `history` are the turns sampled so far in this sample, the
    one that is continued last, and `history_messages` what that one was asked with: when `messages`
    extend it, the engine continues its exact ids (prompt ids + sampled ids + new suffix ids) and never
    re-tokenises what was sampled. How often this prompt was asked before enters the key of the draws:
    counted over `history`, plus `waiting`, the equal requests of this sample that are still open.
    `pieces`: the turn is to say which bytes each token stands for.
    """

    model: ModelRef
    policy: PolicyRef
    tuning: Literal["lora", "full"] = "lora"
    lora_alpha: float = 32.0
    params: SamplingParams
    key: DrawKey
    messages: tuple[Message, ...]
    history: tuple[Turn, ...] = ()
    history_messages: tuple[Message, ...] = ()
    waiting: int = 0
    pieces: bool = False


class Sampler(Protocol):
    """An engine that samples. Any number of requests may be in flight; they share batches."""

    async def sample(self, request: SampleRequest) -> Turn:
        """Sample one completion. Raises UserCodeError(PROMPT_TOO_LONG) when the prompt does not fit,
        TransientError when the engine is gone."""
        ...

    async def prepare(self, request: SampleRequest) -> None:
        """Get all that this request is sampled from (base model, weights, a server that has them),
        however long it takes. Raises TransientError; what else is wrong, `sample` may say."""
        ...


class Sequence(Value):
    """One training row: ids, which of them are actions, and the behaviour logprobs."""

    tokens: tuple[int, ...]
    loss_mask: tuple[Literal[0, 1], ...]
    logprobs: tuple[float, ...]


class SampleFailure(Value):
    category: FailureCategory
    message: str


class SampleRecord(Value):
    """One attempt at a dataset row, as it happened: a fact, recorded once.

    `sequences` has one row, or several when the workflow rewrote the history. `text` is the final
    answer; `messages` the conversation that the grader reads. A failed sample has `failure` set.
    `alarm`: of its turns.
    """

    index: int
    messages: tuple[Message, ...] = ()
    text: str = ""
    sequences: tuple[Sequence, ...] = ()
    num_turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    truncated: bool = False
    failure: SampleFailure | None = None
    alarm: str | None = None


class SampleBatch(Value):
    """The content of a group artifact: samples of one group in the order of their index."""

    group: str
    samples: tuple[SampleRecord, ...]


class Grade(Value):
    """The reward of one sample. None: no reward could be had; it stays out of every baseline."""

    index: int
    reward: float | None
    parts: dict[str, float] = {}
    failure: SampleFailure | None = None


def sequences_of(turns: tuple[Turn, ...]) -> tuple[Sequence, ...]:
    """Turns of one sample -> training rows: a turn whose prompt extends the row before it continues
    that row (its new prompt tokens are context), any other starts a new row."""
    rows: list[tuple[list[int], list[Literal[0, 1]], list[float]]] = []
    for turn in turns:
        if rows and list(turn.prompt_ids[: len(rows[-1][0])]) == rows[-1][0]:
            tokens, mask, logprobs = rows[-1]
            context = list(turn.prompt_ids[len(tokens) :])
        else:
            tokens, mask, logprobs = [], [], []
            rows.append((tokens, mask, logprobs))
            context = list(turn.prompt_ids)
        tokens += [*context, *turn.completion_ids]
        mask.extend([0] * len(context))
        mask.extend([1] * len(turn.completion_ids))
        logprobs += [0.0] * len(context) + list(turn.logprobs)
    return tuple(
        Sequence(tokens=tuple(t), loss_mask=tuple(m), logprobs=tuple(p)) for t, m, p in rows
    )
