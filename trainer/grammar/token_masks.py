"""Token masks of a grammar: which tokens of a model's vocabulary an answer may have next.

A mask is a pure function of the vocabulary, the grammar and the tokens so far. So the sampler and the
learner compute it alike, and an answer's record needs only the grammar. llguidance computes masks. Its
limits bound the time and the memory of a grammar (of a large `multipleOf` they do not, so
`answer_grammar.py` refuses it). So a grammar is data like a prompt: one that is too large or allows
nothing is refused. The package is imported when a request has a constraint.

A mask is bytes, and bit `token % 8` of byte `token // 8` says whether the token is allowed.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from schemas.errors import CorruptData, FailureCategory, UserCodeError
from schemas.models.constraints import AppliedGrammar, VocabularyKind
from schemas.sampling import Sequence as TokenSequence
from trainer.model.base import Base
from trainer.model.text_parts import ids_behind, prepends
from trainer.model.token_bytes import TokenBytes

LARGEST_GRAMMAR = 320 << 10
"""In characters: the largest schema and the schemas of all tools fit, with what is around them."""
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Bounds of the work of one grammar and of each of its masks. They are llguidance's own, except that the
states of a lexer take at most 100 MB. They are part of what a mask is computed from."""


PLACE = re.compile(r"at \d+\(\d+\): ")
"""Where llguidance found an error: a place in our grammar, which says nothing about the schema."""


class GrammarState:
    """A grammar, advanced by the tokens of an answer. `allowed` is the mask of its next token."""

    def __init__(self, matcher: Any, text: str, vocabulary: VocabularyKind) -> None:
        self._matcher = matcher
        self.text = text
        self._vocabulary = vocabulary
        self._digest = hashlib.sha256()
        self.allowed = self._next_mask()

    def advance(self, token: int, *, is_last: bool = False) -> None:
        """Take the token that was drawn under `allowed`, and compute the mask of the next one, unless it
        was the last. Raises UserCodeError when the token is not allowed, or no token may follow it."""
        if not is_allowed(self.allowed, token):
            raise UserCodeError(
                FailureCategory.VALIDATION,
                f"the grammar of the answer does not allow token {token}, which was sampled",
            )
        self._digest.update(self.allowed)
        if not is_last:
            self._matcher.consume_token(token)
            self.allowed = self._next_mask()

    def to_record(self) -> AppliedGrammar:
        """The grammar with the hash of the masks that tokens were drawn under."""
        return AppliedGrammar(
            text=self.text, masks_sha256=self._digest.hexdigest(), vocabulary=self._vocabulary
        )

    def _next_mask(self) -> bytes:
        """Raises UserCodeError when no token is allowed, or the grammar takes too much work."""
        mask = bytes(self._matcher.compute_bitmask())
        why = PLACE.sub("", self._matcher.get_error()).partition("\n")[0] or self._why_it_stopped()
        if why or not any(mask):
            why = why or "no token of the model's vocabulary may come next"
            raise UserCodeError(
                FailureCategory.VALIDATION,
                f"the answer's JSON schema cannot be followed: {why[:300]}; simplify the schema",
            )
        return mask

    def _why_it_stopped(self) -> str:
        """Why it stopped before the answer is complete, or an empty text."""
        if self._matcher.is_stopped() and not self._matcher.is_accepting():
            return f"it ends before the answer is complete ({self._matcher.stop_reason()})"
        return ""


class GrammarVocabulary:
    """A model's vocabulary as llguidance reads it. Special tokens are allowed only where a grammar
    names them. The ids that end a turn are allowed where a grammar is complete."""

    kind: VocabularyKind = "ours"
    names: Mapping[str, int] = {}
    """Tokens that a grammar must name by their ids, although they are text to us."""
    ends: Sequence[int] = ()
    """Tokens that a grammar must name as its end."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], *, size: int
    ) -> None:
        """`size` is the number of the model's logits, which may be more than the tokenizer's tokens.
        Raises UserCodeError for a model without a token that ends a turn."""
        import llguidance

        _require_an_end(stop_ids)
        pieces = TokenBytes(tokenizer)
        num = min(size, len(tokenizer))
        self.eos_token_id = min(stop_ids)
        self.bos_token_id = None
        self.tokens = [bytes(pieces.piece(token)) for token in range(num)]
        self.special_token_ids = sorted(token for token in pieces.special if token < num)
        self._tokenizer = tokenizer
        self._special = pieces.special
        self._encode = ids_behind if prepends(tokenizer) else _ids_of
        self._vocabulary = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), n_vocab=size, eos_token=sorted(stop_ids)
        )

    def __call__(self, text: bytes | str) -> list[int]:
        """The ids of a text behind another one. Where a grammar allows one text only, its masks allow
        these ids. So they must have the bytes of this text: where the tokenizer puts a space before it,
        or reads a special token in it, they are the longest tokens from its beginning."""
        shown = text if isinstance(text, str) else text.decode(errors="replace")
        ids = self._encode(self._tokenizer, shown)
        if self._special.isdisjoint(ids) and self._bytes_of(ids) == shown.encode():
            return ids
        return list(self._vocabulary.greedy_tokenize(shown))

    def _bytes_of(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[token] for token in ids if token < len(self.tokens))

    def start(self, grammar: str) -> GrammarState:
        """A grammar before the first token. Raises UserCodeError when it is too large, is not valid, or
        allows nothing."""
        if len(grammar) > LARGEST_GRAMMAR:
            raise UserCodeError(
                FailureCategory.VALIDATION,
                f"the answer's grammar has {len(grammar)} characters; at most {LARGEST_GRAMMAR} are "
                "allowed. Use a smaller schema, or offer fewer tools",
            )
        import llguidance

        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        return GrammarState(matcher, grammar, self.kind)


class VllmVocabulary(GrammarVocabulary):
    """A model's vocabulary as the llguidance of a vLLM server reads it: from the tokenizer's file. More
    of its added tokens are special there, such as `<tool_call>` of Qwen3. Only one id ends a turn there,
    so a grammar names all of them."""

    kind = "vllm"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], *, size: int
    ) -> None:
        """Raises UserCodeError for a model without a token that ends a turn, and for a tokenizer that
        llguidance cannot read."""
        import llguidance.hf

        _require_an_end(stop_ids)
        fast: Any = tokenizer
        try:
            self._vocabulary = llguidance.hf.from_tokenizer(fast, max(size, len(tokenizer)))
        except ValueError as error:
            raise UserCodeError(
                FailureCategory.VALIDATION,
                "vLLM cannot force an answer of this model, because llguidance does not read its "
                f"tokenizer ({error}): set HEADRACE_SAMPLER=torch, or leave out tool_choice and "
                "response_format",
            ) from error
        ours = TokenBytes(tokenizer).special
        self.names = {
            token.content: number
            for number, token in tokenizer.added_tokens_decoder.items()
            if number not in ours and self._vocabulary.is_special_token(number)
        }
        self.ends = sorted(stop_ids)


def _require_an_end(stop_ids: frozenset[int]) -> None:
    if not stop_ids:
        raise UserCodeError(
            FailureCategory.VALIDATION,
            "the model has no token that ends an answer, so none can be forced: set eos_token_id in "
            "its generation_config.json, or leave out tool_choice and response_format",
        )


def _ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


KINDS: dict[VocabularyKind, type[GrammarVocabulary]] = {
    "ours": GrammarVocabulary,
    "vllm": VllmVocabulary,
}


@lru_cache(4)
def _vocabulary(
    tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], size: int, kind: VocabularyKind
) -> GrammarVocabulary:
    return KINDS[kind](tokenizer, stop_ids, size=size)


def vocabulary_of(base: Base, kind: VocabularyKind = "ours") -> GrammarVocabulary:
    """The vocabulary of a base model. It is made once, because that takes a second for a large one."""
    size = int(base.model.config.get_text_config().vocab_size)
    return _vocabulary(base.tokenizer, base.stop_ids, size, kind)


def is_allowed(mask: bytes, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def num_allowed(mask: bytes) -> int:
    return int.from_bytes(mask).bit_count()


def masks_of(sequence: TokenSequence, base: Base, seen: dict[bytes, bytes]) -> dict[int, bytes]:
    """Place in a training row -> the mask that its token was drawn under, for the tokens that were drawn
    under one. Equal masks are one object, that in `seen`, because a mask of a large vocabulary has 19 kB
    and few masks differ. Raises CorruptData unless these are the masks of its record."""
    masks: dict[int, bytes] = {}
    for span in sequence.constrained:
        answer = sequence.tokens[span.start : span.end]
        vocabulary = vocabulary_of(base, span.grammar.vocabulary)
        try:
            found = _masks_of_answer(answer, vocabulary.start(span.grammar.text), seen)
        except UserCodeError as error:
            raise _different(str(error.message)) from error
        if found[1] != span.grammar.masks_sha256:
            raise _different("the hash of the masks differs")
        masks |= dict(zip(range(span.start, span.end), found[0], strict=True))
    return masks


def _masks_of_answer(
    answer: Sequence[int], state: GrammarState, seen: dict[bytes, bytes]
) -> tuple[list[bytes], str]:
    masks = []
    for number, token in enumerate(answer, start=1):
        masks.append(seen.setdefault(state.allowed, state.allowed))
        state.advance(token, is_last=number == len(answer))
    return masks, state.to_record().masks_sha256


def _different(why: str) -> CorruptData:
    return CorruptData(
        f"the token masks of a constrained answer are not those that it was sampled under: {why}. "
        "Learner and sampler need the same version of llguidance and the same model"
    )
