"""Requests for samples and their results: the types that gateway, rollout, grader and engines share.

Only here do the engines (trainer) and the shell (infra, consumers) meet. Token ids and logprobs are
recorded at the moment of sampling and never recomputed from text.

Legend: a *sequence* is one row of tokens for the learner. `loss_mask[t]` is 1 where the policy
itself chose token t, and 0 for prompt, tool and observation tokens. `logprobs[t]` is the behaviour
policy's log-probability of token t after temperature (0.0 where the mask is 0).
"""

from collections.abc import Callable
from datetime import date
from typing import Annotated, Literal, Protocol, runtime_checkable

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from schemas.artifact_refs import ArtifactRef
from schemas.errors import FAILED_REWARD, POLICY_FAILURES, FailureCategory
from schemas.models.constraints import AppliedGrammar, ConstrainedSpan, Constraint
from schemas.models.sampling_server import SamplingServer


def _day(text: str) -> str:
    date.fromisoformat(text)
    return text


Day = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"), AfterValidator(_day)]
"""A day as `2026-11-22`."""

UNDATED: Day = "2024-07-26"
"""The date for chat templates of older runs, which recorded none: that of Llama 3's without a clock."""


class Value(BaseModel):
    """A frozen value. Unknown fields are ignored: writing is strict, reading is tolerant."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class ToolSpec(Value):
    """A tool that a conversation offers to the model. `parameters` is the JSON Schema of its arguments,
    as JSON text."""

    name: str
    description: str = ""
    parameters: str = "{}"


class ToolCall(Value):
    """A call of a tool by the model. `arguments` is the JSON text that the model wrote, which may be
    anything else as well."""

    id: str
    name: str
    arguments: str


LoraScaling = Literal["standard", "rank_stabilized"]
"""The factor of an adapter's output: alpha / rank, or alpha / sqrt(rank)."""


def _is_unset(value: object) -> bool:
    return value is None or value in ((), {})


class Message(Value):
    """One chat message, as the chat template sees it.

    An answer of the assistant may have `reasoning` and `tool_calls`. A message of a tool has the
    `tool_call_id` of the call that it answers, and may have the tool's `name`. Fields that are not set
    are not stored.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning: str | None = Field(default=None, exclude_if=_is_unset)
    tool_calls: tuple[ToolCall, ...] = Field(default=(), exclude_if=_is_unset)
    tool_call_id: str | None = Field(default=None, exclude_if=_is_unset)
    name: str | None = Field(default=None, exclude_if=_is_unset)


Precision = Literal["float32", "bfloat16"]

PROVIDER_PREFIX = "provider:"
"""The beginning of a model_path that names a provider's model."""


class ProviderRef(Value):
    """A provider's model behind an OpenAI-compatible API. Its answers have no token ids, so it can be
    evaluated and not trained.

    `name` is how users name it, and `model` how the provider does. `base_url` ends before
    `/chat/completions`. `secret` is the name of the secret with the key, of `workspace` or `submitter`
    (None: no key is sent). `limit` is the name under which the API takes the limit of new tokens.
    `owner` is the evaluation that may make at most `max_calls` requests and spend at most `max_usd`,
    with `usd_per_million` tokens of prompts and of answers as the price.
    """

    name: str
    model: str
    base_url: str
    secret: str | None = None
    limit: str = "max_tokens"
    workspace: str | None = None
    submitter: str | None = None
    owner: str = ""
    max_calls: int = Field(default=10_000, ge=1)
    max_usd: float | None = None
    usd_per_million: tuple[float, float] | None = None
    timeout_s: float = Field(default=300, gt=0)


class ModelRef(Value):
    """Which base model: enough to build the same weights again, anywhere.

    scratch: `name` is a shape that ships with Headrace, initialised from `seed`. directory, hub:
    `name` is the path or the hub id. checkpoint: `name` is `<run id>@<step>`, and `files` are the
    checkpoint's files by name. With full tuning these are config.json, model.safetensors and the
    tokenizer's files. With LoRA they are adapter_config.json, adapter_model.safetensors and, if the
    base model has no public name, the base model under base/. `dtype` is the number format of its
    weights. The weights that are trained on top of them are always float32. provider: `provider` is the
    model, which has no weights here.
    """

    kind: Literal["scratch", "directory", "hub", "checkpoint", "provider"]
    name: str
    seed: int = 0
    dtype: Precision = "float32"
    files: dict[str, ArtifactRef] = {}
    provider: ProviderRef | None = Field(default=None, exclude_if=_is_unset)


class PolicyRef(Value):
    """A policy version of a run: the base model plus the trained weights, if any were trained.

    `weights` is a safetensors artifact: the LoRA adapter, or all weights with full tuning. None
    means the unchanged base model (the evaluation of a plain model).
    """

    version: int = Field(ge=0)
    weights: ArtifactRef | None = None


class SamplingParams(Value):
    """How tokens are drawn. Temperature 0 is greedy. `seed` is the seed of the run. `date` is the
    current date for chat templates that ask for it, because a prompt must not depend on when it is
    rendered. With `allows_wide_native`, C may decode models that are not narrow, rounding as C does."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_prompt_tokens: int = Field(default=8192, ge=1)
    max_new_tokens: int = Field(default=8192, ge=1)
    stop: tuple[str, ...] = ()
    seed: int = 0
    deterministic: bool = False
    date: Day | None = None
    allows_wide_native: bool = Field(default=False, exclude_if=lambda allows: not allows)


class DrawKey(Value):
    """The place of a sample in its run. Together with the prompt's hash, the prompt's occurrence and
    the position in the completion, it is the key of the counter-based generator. A draw therefore
    depends neither on the other sequences of its batch nor on timing."""

    purpose: str
    step: int
    slot: int
    replacement: int
    sample: int


class Usage(Value):
    """The tokens of a provider's answer, as it counts them, and their price in US dollars, if known."""

    prompt_tokens: int = Field(default=0, ge=0)
    completion_tokens: int = Field(default=0, ge=0)
    usd: float | None = None


class LikelyToken(Value):
    """A token that could have been drawn: the bytes of its text, and its logprob."""

    piece: tuple[int, ...]
    logprob: float


class Turn(Value):
    """One exact exchange with the engine: ids in, ids and logprobs out.

    `text` is the content of the answer, and `answer` is the whole message that the ids were parsed into
    (None: the text is all of it). `alarm` describes what is wrong with servers that the engine has
    fenced, if there are any (nothing in this turn comes from them). `pieces`, if the request asked for
    them, are the UTF-8 bytes of each completion id. A piece is None for an id that is not part of the
    text (a special token, or what a stop string cut off). `likeliest`, if the request asked for them,
    are the likeliest tokens in the place of each completion id, the likeliest first. `grammar` is what
    the answer was sampled under, if anything, and `server` the server that sampled it, if one did. An
    answer of a provider's model has no ids, and has its `usage` instead.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    alarm: str | None = None
    pieces: tuple[tuple[int, ...] | None, ...] | None = None
    answer: Message | None = None
    usage: Usage | None = Field(default=None, exclude_if=_is_unset)
    likeliest: tuple[tuple[LikelyToken, ...], ...] | None = Field(
        default=None, exclude_if=_is_unset
    )
    grammar: AppliedGrammar | None = Field(default=None, exclude_if=_is_unset)
    server: SamplingServer | None = Field(default=None, exclude_if=_is_unset)

    @property
    def message(self) -> Message:
        """The answer as a message of the assistant."""
        return self.answer or Message(role="assistant", content=self.text)

    @property
    def counts(self) -> Usage:
        """The number of its tokens, as far as they are known."""
        return self.usage or Usage(
            prompt_tokens=len(self.prompt_ids), completion_tokens=len(self.completion_ids)
        )


class SampleRequest(Value):
    """One completion to sample.

    `messages` is the whole conversation, and `tools` are the tools that it offers. `history` ends with
    the turn of this sample that it continues, and `history_messages` are the messages of that turn's
    request. When `messages` extend them, the engine continues with its exact ids (prompt ids, sampled
    ids, new suffix ids) and never tokenises again what was sampled. `occurrence` is the number of
    earlier requests of this sample with an equal prompt, answered or not. It is part of the key of the
    draws. `pieces` asks the turn to say which bytes each token represents, and `likeliest` asks for
    that many of the likeliest tokens in the place of each. With `prompt`, a text or token ids, the
    answer continues that instead of a conversation. `constraint` is what the answer is forced to be.
    Servers to `avoid` are asked only if there is no other.
    """

    model: ModelRef
    policy: PolicyRef
    tuning: Literal["lora", "full"] = "lora"
    lora_alpha: float = 32.0
    lora_scaling: LoraScaling | None = Field(default=None, exclude_if=_is_unset)
    params: SamplingParams
    key: DrawKey
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    history: tuple[Turn, ...] = ()
    history_messages: tuple[Message, ...] = ()
    occurrence: int = 0
    pieces: bool = False
    likeliest: int | None = Field(default=None, ge=1, le=20, exclude_if=_is_unset)
    prompt: str | tuple[int, ...] | None = Field(default=None, exclude_if=_is_unset)
    constraint: Constraint | None = Field(default=None, exclude_if=_is_unset)
    avoid: tuple[str, ...] = Field(default=(), exclude_if=_is_unset)


class Sampler(Protocol):
    """An engine that samples. Any number of requests may be in flight, and they share batches."""

    async def sample(self, request: SampleRequest) -> Turn:
        """Sample one completion. Raises UserCodeError(PROMPT_TOO_LONG) when the prompt does not fit,
        and TransientError when the engine does not answer."""
        ...

    async def prepare(self, request: SampleRequest) -> None:
        """Load all that this request is sampled from (the base model, the weights, a server that has
        them), however long it takes. Raises TransientError, and leaves other errors to `sample`."""
        ...


Tell = Callable[[str], None]
"""Takes the next piece of the text of an answer. It returns at once and raises nothing."""


@runtime_checkable
class StreamingSampler(Protocol):
    """A sampler that can tell the text of an answer while it is sampled."""

    async def stream(self, request: SampleRequest, tell: Tell) -> Turn:
        """Sample one completion, exactly as `sample` does, and call `tell` with pieces of its text. The
        pieces together are the beginning of the answer's content, and never part of a tool call.
        Raises what `sample` raises."""
        ...


@runtime_checkable
class TokenCounter(Protocol):
    """A sampler that can say how long a prompt is."""

    async def count_prompt_tokens(self, request: SampleRequest) -> int:
        """Return how many tokens the prompt of a request has. Raises what `sample` raises."""
        ...


class Sequence(Value):
    """One training row: its ids, which of them the policy chose, the behaviour logprobs, and the answers
    in it that were sampled under a grammar. A teacher on a server has logprobs in the same places."""

    tokens: tuple[int, ...]
    loss_mask: tuple[Literal[0, 1], ...]
    logprobs: tuple[float, ...]
    constrained: tuple[ConstrainedSpan, ...] = Field(default=(), exclude_if=_is_unset)
    teacher_logprobs: tuple[float, ...] = Field(default=(), exclude_if=_is_unset)


class RewardedTurn(Value):
    """A turn of a sample: the row of the sample that its tokens are in, how many of them the policy
    chose, and the reward that the workflow gave to it and the agent that it named, if it did. The chosen
    tokens of a row are those of its turns, in their order. `number` counts the requests of the sample
    (None: it is the turn's place in the record)."""

    row: int = Field(ge=0)
    num_actions: int = Field(ge=0)
    reward: float | None = None
    agent: str | None = Field(default=None, exclude_if=_is_unset)
    number: int | None = Field(default=None, ge=0, exclude_if=lambda number: number is None)


class SampleFailure(Value):
    category: FailureCategory
    message: str


class SampleOutput(Value):
    """The traces of user code in one attempt: the text that it printed, the traceback of its error
    (frames of the workspace only), and the files of its artifacts directory by name. All are bounded.
    `is_cut` is true if there was more."""

    stdout: str = ""
    traceback: str | None = None
    files: dict[str, ArtifactRef] = {}
    is_cut: bool = False


class Grade(Value):
    """The reward of one sample. None means that there is no reward, and the sample is left out of
    every baseline. `questions` are the texts that judges read about the sample, by rubric. They are not
    part of an event."""

    index: int
    reward: float | None
    parts: dict[str, float] = {}
    failure: SampleFailure | None = None
    questions: dict[str, str] = Field(default={}, exclude=True)

    @property
    def is_failed(self) -> bool:
        """Whether the sample failed because of what the policy wrote."""
        return self.failure is not None and self.failure.category in POLICY_FAILURES

    @property
    def counted_reward(self) -> float | None:
        """The reward as figures count it, whatever is trained on; None if the sample is left out."""
        return FAILED_REWARD if self.is_failed else self.reward


class RewardScore(Value):
    """The score of one sample by the reward model `name`, or the reason why there is none."""

    name: str
    score: float | None = None
    problem: str | None = None


class SampleRecord(Value):
    """One attempt at a dataset row, as it happened: a fact that is recorded once.

    `sequences` has one row, or several when the workflow rewrote the history. `text` is the final
    answer. `messages` is the conversation that the grader reads, and `tools` are the tools that it
    offered last. `branches` are the conversations of its requests that no other request continues, in
    their order, if there are several. A failed sample has `failure` set. `alarm` is that of its turns.
    `output` is what user code left behind. `grade` is set if the sample was graded where it was made, by
    a rollout server. `scores` are those of the run's reward models. `turns` are all its turns, if one
    has a reward or an agent, or another place than its request. `agent_rewards` are those of agents.
    `row_tools` are the tools that the requests of each row of `sequences` offered, if a teacher reads a
    hint in them and not all of them offered `tools`. `servers` are those that sampled its turns. The
    sample of a provider's model has no sequences, and its price in US dollars (`usd`) if that is known.
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
    tools: tuple[ToolSpec, ...] = Field(default=(), exclude_if=_is_unset)
    branches: tuple[tuple[Message, ...], ...] = Field(default=(), exclude_if=_is_unset)
    output: SampleOutput | None = Field(default=None, exclude_if=_is_unset)
    grade: Grade | None = Field(default=None, exclude_if=_is_unset)
    usd: float | None = Field(default=None, exclude_if=_is_unset)
    turns: tuple[RewardedTurn, ...] = Field(default=(), exclude_if=_is_unset)
    agent_rewards: dict[str, float] = Field(default={}, exclude_if=_is_unset)
    scores: tuple[RewardScore, ...] = Field(default=(), exclude_if=_is_unset)
    row_tools: tuple[tuple[ToolSpec, ...], ...] = Field(default=(), exclude_if=_is_unset)
    servers: tuple[SamplingServer, ...] = Field(default=(), exclude_if=_is_unset)

    @property
    def conversations(self) -> tuple[tuple[Message, ...], ...]:
        """The conversation that the grader reads, and the branches that differ from it."""
        return (self.messages, *(one for one in self.branches if one != self.messages))


class SampleBatch(Value):
    """The content of a group artifact: samples of one group in the order of their index. In that of a
    graded group, `grader_output` is what the grader left behind, `teacher_hint` what the teacher reads
    behind the prompt, and `teacher_tokens` a teacher server's texts of the tokens, by id."""

    group: str
    samples: tuple[SampleRecord, ...]
    grader_output: SampleOutput | None = Field(default=None, exclude_if=_is_unset)
    teacher_hint: str | None = Field(default=None, exclude_if=_is_unset)
    teacher_tokens: dict[int, str] = Field(default={}, exclude_if=_is_unset)


class JudgeUsage(Value):
    """Requests to judges, their tokens, and their price in US dollars as far as it is known."""

    calls: int = Field(default=0, ge=0)
    tokens: int = Field(default=0, ge=0)
    usd: float = Field(default=0.0, ge=0)

    def __add__(self, other: "JudgeUsage") -> "JudgeUsage":
        return JudgeUsage(
            calls=self.calls + other.calls,
            tokens=self.tokens + other.tokens,
            usd=self.usd + other.usd,
        )


class JudgeAnswer(Value):
    """The text that a judge answered, and its usage. `finish_reason` is the provider's own word.
    `refusal` says why it does not take this one request, if it does not."""

    text: str
    finish_reason: str = "stop"
    usage: JudgeUsage = JudgeUsage()
    refusal: str | None = None


class Judgement(Value):
    """The score of one sample by one rubric, or the reason why there is none. `usage` counts everything
    that was spent on it. Where a judge scored a whole group, it is that of the first sample."""

    index: int
    rubric: str
    model: str
    score: float | None
    explanation: str = ""
    problem: str | None = None
    usage: JudgeUsage = JudgeUsage()


class JudgementBatch(Value):
    """The content of a judgement artifact: all judgements of one group, by sample and rubric."""

    group: str
    judgements: tuple[Judgement, ...]


def sequences_of(turns: tuple[Turn, ...]) -> tuple[Sequence, ...]:
    """The turns of one sample become training rows. A turn whose prompt extends a row continues that row
    (its new prompt tokens are context), and the longest if there are several. Any other turn starts a
    new row. So each sampled token is in one row, where its mask is 1."""
    return sequences_and_rows_of(turns)[0]


def sequences_and_rows_of(turns: tuple[Turn, ...]) -> tuple[tuple[Sequence, ...], tuple[int, ...]]:
    """The training rows (`sequences_of`), and the number of the row of each turn."""
    rows: list[tuple[list[int], list[Literal[0, 1]], list[float], list[ConstrainedSpan]]] = []
    places: list[int] = []
    for turn in turns:
        prompt = list(turn.prompt_ids)
        extended = [row for row in rows if prompt[: len(row[0])] == row[0]]
        row = max(reversed(extended), key=lambda row: len(row[0]), default=([], [], [], []))
        if not extended:
            rows.append(row)
        places.append(next(n for n, one in enumerate(rows) if one is row))
        tokens, mask, logprobs, constrained = row
        context = prompt[len(tokens) :]
        tokens += [*context, *turn.completion_ids]
        mask.extend([0] * len(context))
        mask.extend([1] * len(turn.completion_ids))
        logprobs += [0.0] * len(context) + list(turn.logprobs)
        if turn.grammar is not None:
            start = len(tokens) - len(turn.completion_ids)
            constrained += [ConstrainedSpan(start=start, end=len(tokens), grammar=turn.grammar)]
    sequences = tuple(
        Sequence(tokens=tuple(t), loss_mask=tuple(m), logprobs=tuple(p), constrained=tuple(c))
        for t, m, p, c in rows
    )
    return sequences, tuple(places)
