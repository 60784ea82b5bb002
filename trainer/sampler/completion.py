"""One completion that is being sampled: its request, the tokens drawn so far, and when it has ended."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from schemas.errors import FailureCategory, UserCodeError
from schemas.models.constraints import VocabularyKind
from schemas.sampling import SampleRequest, SamplingParams, ToolSpec, Turn
from trainer.grammar.answer_grammar import answer_grammar
from trainer.grammar.token_masks import GrammarState, vocabulary_of
from trainer.model.base import Base
from trainer.model.chat_template import Chat
from trainer.model.lora_names import Scaling, Tensors
from trainer.policy import LoadedModel
from trainer.sampler.counter_rng import CounterRng, prompt_hash
from trainer.sampler.prompt_length import longest_prompt, refuse_too_long, too_long
from trainer.sampler.stop_strings import StopStrings

TOP_P = (
    "sampling.rollout_top_p must be 1 in training, because the tokens that top-p cuts off bias the "
    "ratio of every token. Use rollout_temperature instead"
)
SPARE_UNIFORM = 2**0.5 - 1
"""The random number of dummy rows. It is not next to the border of two tokens if all are equally
likely, because such a number would cost an exact sum (`trainer/native/pick.py`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """The policy version that all rows of a batch share. It is identified by the base and the adapter's
    scaling, and by the hash of the trained tensors."""

    base: str
    sha256: str
    loaded: LoadedModel
    trained: Tensors
    scaling: Scaling

    @property
    def key(self) -> str:
        return f"{self.base}|{self.sha256}"


@dataclass(slots=True, eq=False)
class Completion:
    """A completion under way: a row of a decode batch. The event loop sets `is_cancelled` when nobody
    waits for it any more, and the device thread then drops it."""

    version: Version
    chat: Chat
    stop_ids: frozenset[int]
    params: SamplingParams
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    rng: CounterRng
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    text: str | None = None
    stops: StopStrings | None = None
    shows_pieces: bool = False
    tools: tuple[ToolSpec, ...] = ()
    is_cancelled: bool = False
    has_diverged: bool = False
    is_plain: bool = False
    """Whether it continues a text and answers no message."""
    grammar: GrammarState | None = None
    """The grammar that the answer follows, if the request forces it to be something."""
    grammar_error: UserCodeError | None = None
    """Why the grammar cannot be followed further, if it cannot."""

    @property
    def length(self) -> int:
        """The number of tokens so far, including the prompt."""
        return len(self.prompt_ids) + len(self.completion_ids)

    def uniform(self, later: int = 0) -> float:
        """The random number for the next token, or for the token `later` positions after it."""
        return self.rng.uniform_at(len(self.completion_ids) + later)

    @property
    def is_over(self) -> bool:
        has_failed = self.has_diverged or self.grammar_error is not None
        return self.finish is not None or self.is_cancelled or has_failed

    def append(self, token: int, logprob: float) -> None:
        """Append a drawn token. A token that ends the turn belongs to the completion. A logprob
        that is not finite ends the row, because the token is then not a sample of the policy."""
        if not math.isfinite(logprob):
            self.has_diverged = True
            return
        self.completion_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids or self._has_stop_string():
            self.finish = "stop"
        elif len(self.completion_ids) >= self.max_new_tokens:
            self.finish = "length"
        if self.grammar is not None:
            try:
                self.grammar.advance(token, is_last=self.finish is not None)
            except UserCodeError as error:
                self.grammar_error = error

    def _has_stop_string(self) -> bool:
        """Whether a stop string has appeared. If so, the text ends before it."""
        if not self.params.stop:
            return False
        if self.stops is None:
            self.stops = StopStrings(self.params.stop, self.chat.decode)
        self.text = self.stops.cut(self.completion_ids)
        return self.text is not None

    def stable_prefix(self) -> str:
        """The beginning of the answer's content that its next tokens cannot change."""
        if self.is_plain:
            return self.chat.settled_plain_text(self.completion_ids, stop=self.params.stop)
        return self.chat.stable_prefix(
            self.completion_ids,
            prompt_ids=self.prompt_ids,
            tools=self.tools,
            stop=self.params.stop,
        )

    def to_turn(self) -> Turn:
        """The prompt and the completion as one turn. Raises UserCodeError when the policy has
        diverged, or its grammar cannot be followed."""
        if self.grammar_error is not None:
            raise self.grammar_error
        if self.has_diverged:
            raise UserCodeError(
                FailureCategory.INTERNAL,
                "the policy's logits are not finite: training has diverged; lower training.lr",
            )
        text = self.chat.decode(self.completion_ids) if self.text is None else self.text
        answer = (
            None
            if self.is_plain
            else self.chat.answer(
                self.completion_ids, text, prompt_ids=self.prompt_ids, tools=self.tools
            )
        )
        return Turn(
            prompt_ids=self.prompt_ids,
            completion_ids=tuple(self.completion_ids),
            logprobs=tuple(self.logprobs),
            text=text if answer is None else answer.content,
            answer=answer,
            finish_reason=self.finish or "length",
            pieces=self.chat.pieces(self.completion_ids, text) if self.shows_pieces else None,
            grammar=None if self.grammar is None else self.grammar.to_record(),
        )


class DrawParameters(TypedDict):
    """The arguments of `draw_tokens` besides the logits."""

    temperatures: list[float]
    top_ps: list[float]
    uniforms: list[float]
    masks: list[bytes | None]


def draw_parameters(rows: Sequence[Completion], size: int) -> DrawParameters:
    """The arguments of `draw_tokens` for these rows, filled up to `size` with values for dummy rows."""
    spare = size - len(rows)
    masks = [row.grammar.allowed if row.grammar else None for row in rows]
    return {
        "temperatures": [r.params.temperature for r in rows] + [1.0] * spare,
        "top_ps": [r.params.top_p for r in rows] + [1.0] * spare,
        "uniforms": [r.uniform() for r in rows] + [SPARE_UNIFORM] * spare,
        "masks": masks + [None] * spare,
    }


def new_completion(
    request: SampleRequest,
    version: Version,
    chat: Chat,
    *,
    context: int,
    masks_over: VocabularyKind = "ours",
) -> Completion:
    """The completion that a request asks for, for a model that has `context` positions. `masks_over` is
    the vocabulary of the masks of a constrained answer. Raises UserCodeError when the prompt does not
    fit, or the constraint cannot be followed."""
    params = request.params
    refuse_too_long(request, chat, context=context)
    prompt_ids = tuple(chat.prompt_ids(request))
    if len(prompt_ids) > longest_prompt(request, context=context):
        raise too_long(request, str(len(prompt_ids)), context=context)
    _refuse_unreadable(prompt_ids, version.loaded.base)
    grammar = None
    if request.constraint is not None:
        vocabulary = vocabulary_of(version.loaded.base, masks_over)
        text = answer_grammar(
            *(request.constraint, request.tools, chat, prompt_ids),
            names=vocabulary.names,
            ends=vocabulary.ends,
        )
        grammar = vocabulary.start(text)
    return Completion(
        version=version,
        chat=chat,
        grammar=grammar,
        stop_ids=version.loaded.base.stop_ids,
        params=params,
        prompt_ids=prompt_ids,
        max_new_tokens=min(params.max_new_tokens, context - len(prompt_ids)),
        shows_pieces=request.pieces,
        tools=request.tools,
        is_plain=request.prompt is not None,
        rng=CounterRng(
            request.key,
            seed=params.seed,
            prompt=prompt_hash(prompt_ids),
            occurrence=request.occurrence,
        ),
    )


def _refuse_unreadable(prompt_ids: tuple[int, ...], base: Base) -> None:
    """Raise UserCodeError for a prompt that a model cannot read, because of its tokenizer's files."""
    if not prompt_ids:
        raise UserCodeError(
            FailureCategory.VALIDATION,
            "the model's chat template writes nothing for these messages; use another template",
        )
    if max(prompt_ids) >= base.num_embeddings:
        raise UserCodeError(
            FailureCategory.VALIDATION,
            f"the model's tokenizer writes the token {max(prompt_ids)}, and the model has only "
            f"{base.num_embeddings}; use the tokenizer of this model",
        )
