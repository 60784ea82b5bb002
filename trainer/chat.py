"""Chat messages -> token ids, by the model's own template.

Sampled ids are never made again from text (two texts can be one, and one text several ids). When a
conversation extends what was sampled, the next prompt is the previous prompt's ids, the sampled
ids, and the ids of what the template puts after the reply. When the template rewrites what came
before (some drop earlier reasoning), the conversation is rendered afresh, and a new training row
starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from schemas.errors import FailureCategory, UserCodeError
from schemas.sampling import Message, SampleRequest

BEGINNINGS = 64
"""Conversations whose ids are kept: the samples of a group begin alike."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A turn that has ended: its text as the template wrote it, its ids with the one that ends it."""

    text: str
    ids: list[int]


class Chat:
    """A tokenizer and the ids that end a turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._begun = lru_cache(BEGINNINGS)(self._begin)

    def text(self, messages: Sequence[Message], *, reply_next: bool) -> str:
        """The conversation as the template writes it; with `reply_next`, up to where the assistant
        begins. Raises UserCodeError when the template refuses the messages."""
        plain = [{"role": m.role, "content": m.content} for m in messages]
        try:
            rendered = self._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=reply_next
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UserCodeError(
                FailureCategory.VALIDATION,
                f"the model's chat template does not take these messages: {error}",
            ) from error
        return str(rendered)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def prompt_ids(self, request: SampleRequest) -> list[int]:
        """The prompt of a request: continued exactly where it extends what was sampled."""
        continued = self._continuation(request) if request.history else None
        return list(self._begun(request.messages)) if continued is None else continued

    def _begin(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return tuple(self.encode(self.text(messages, reply_next=True)))

    def _continuation(self, request: SampleRequest) -> list[int] | None:
        before, last = request.history_messages, request.history[-1]
        num_before = len(before)
        if len(request.messages) <= num_before or request.messages[:num_before] != before:
            return None
        reply = request.messages[num_before]
        if reply.role != "assistant" or reply.content != last.text:
            return None
        said = self.text(before, reply_next=True) + last.text
        whole = self.text(request.messages, reply_next=True)
        if not whole.startswith(said):
            return None
        suffix = self.encode(whole[len(said) :])
        ended = last.completion_ids[-1:]
        if ended and ended[0] in self._stop_ids and suffix[:1] == list(ended):
            suffix = suffix[1:]
        return [*last.prompt_ids, *last.completion_ids, *suffix]

    def closed(self, text: str) -> "Closed":
        """What a template wrote, up to and with the last token that ends a turn; what comes after it
        belongs to nobody. Where the template has no such token the model's own is added: the policy
        must learn to stop."""
        ends = (text.rfind(end) + len(end) for end in self._stop_texts if end in text)
        said = text[: max(ends, default=len(text))]
        ids = self.encode(said)
        is_ended = bool(ids) and ids[-1] in self._stop_ids
        return Closed(said, ids if is_ended else [*ids, self._end_id])

    @property
    def _stop_texts(self) -> list[str]:
        return [str(self._tokenizer.convert_ids_to_tokens(i)) for i in sorted(self._stop_ids)]

    @property
    def _end_id(self) -> int:
        eos = self._tokenizer.eos_token_id
        return int(eos) if isinstance(eos, int) else min(self._stop_ids)
