"""Turns chat messages into token ids with the model's own template.

Sampled ids are never computed again from text, because one text can have several sequences of ids. When
a conversation extends a sampled one, the next prompt is the previous prompt's ids, the sampled ids, and
the ids of the text that the template puts after the reply. When the template rewrites earlier turns
(some drop earlier reasoning), the whole conversation is rendered again, and a new training row starts.

A template may ask for the time (Llama 3's template writes the date into each prompt). It gets the day
that is recorded for the run and never this machine's, so the same conversation has the same ids on every
day.
"""

import string
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from schemas.errors import FailureCategory, UserCodeError
from schemas.sampling import UNDATED, Day, Message, SampleRequest, ToolSpec, Turn
from trainer.model.char_tokenizer import CHAT_TEMPLATE, OUR_TEMPLATES
from trainer.model.family_renderer import LONG_CHARS, FamilyRenderer, find_renderer
from trainer.model.stable_prefix import (
    after_reasoning,
    before_marks,
    before_tagged_call,
    whole_characters,
)
from trainer.model.template_process import shared_process
from trainer.model.text_parts import ids_of_parts, prepends
from trainer.model.token_bytes import TokenBytes
from trainer.model.tool_calls import (
    END_THINK,
    MARK,
    THINK,
    as_message,
    call_form,
    split_marked,
    split_reasoning,
    split_tagged,
    template_message,
    template_tool,
)

CLOCK = "strftime_now"
"""The function that templates call for the time, with a format."""

DAY = """{% macro strftime_now(format) %}{% set at = namespace(code='') %}{% for c in format %}\
{% if at.code == '%' and c in '-_0^#' %}{% set at.code = '%' + c %}\
{% elif at.code %}{{ headrace_today.get(at.code + c, at.code + c) }}{% set at.code = '' %}\
{% elif c == '%' %}{% set at.code = c %}{% else %}{{ c }}{% endif %}\
{% endfor %}{{ at.code }}{% endmacro %}{{ '' }}"""
"""A macro that is put before a template that asks for the time, so that the template calls it and not
the machine's clock. A template gets plain data only, so the day is passed as the value of each format
code."""

BEGINNINGS = 64
"""The ids of how many conversations are cached. The samples of a group have the same beginning."""
COMPOSED = 4
"""How many characters a tokenizer that normalizes its text (NFC) may make into one."""


class Chat:
    """A tokenizer, the ids that end a turn, and the day that templates use as today. `apart`: texts that
    follow one another are each encoded by themselves (rules 1, `schemas.learner`)."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: frozenset[int],
        *,
        date: Day | None = None,
        apart: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._apart = apart
        self._stop_ids = stop_ids
        self._day = datetime.fromisoformat(date or UNDATED).replace(tzinfo=UTC)
        self._today = codes_of(self._day)
        self._prompt_of = lru_cache(BEGINNINGS)(self._encode_prompt)

    def text(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = (), reply_next: bool
    ) -> str:
        """The conversation as the template writes it. With `reply_next` it ends where the assistant
        begins. Raises UserCodeError when the template rejects the messages."""
        if tools and call_form(self._template, is_ours=self._is_ours) is None:
            raise UserCodeError(
                FailureCategory.VALIDATION,
                "the model's chat template has no tools, or calls in a form that is not known; send no "
                "tools, or use a model with <tool_call> in its template",
            )
        plain = [template_message(m, is_ours=self._is_ours) for m in messages]
        offered = [template_tool(tool) for tool in tools]
        try:
            rendered = self._render(plain, offered, reply_next=reply_next)
        except (TemplateError, TypeError, ValueError) as error:
            raise UserCodeError(
                FailureCategory.VALIDATION,
                f"the model's chat template rejects these messages: {error}",
            ) from error
        return str(rendered)

    def _render(self, messages: list[dict[str, Any]], tools: list[Any], *, reply_next: bool) -> str:
        """The template's output, with the recorded day if it asks for the time. Only our own template is
        rendered in this process, because one that came with a model may loop or fill memory."""
        template = self._template
        if self._is_ours:
            rendered = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=CHAT_TEMPLATE,
                tokenize=False,
                add_generation_prompt=reply_next,
            )
            return str(rendered)
        names: dict[str, Any] = {
            name: list(map(str, value)) if isinstance(value, list | tuple) else str(value)
            for name, value in self._tokenizer.special_tokens_map.items()
        }
        if tools:
            names["tools"] = tools
        if CLOCK in template:
            template, names = DAY + template, {**names, "headrace_today": self._today}
        return shared_process.render(template, messages, reply_next=reply_next, names=names)

    @property
    def _template(self) -> str:
        return str(self._tokenizer.get_chat_template())

    @property
    def _is_ours(self) -> bool:
        return self._template in OUR_TEMPLATES

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts that follow one another (`trainer/model/text_parts.py`)."""
        if not self._prepends:
            return [self.encode(text) for text in texts]
        return ids_of_parts(self._tokenizer, texts)

    @cached_property
    def _prepends(self) -> bool:
        return not self._apart and prepends(self._tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def pieces(self, ids: Sequence[int], text: str) -> tuple[tuple[int, ...] | None, ...]:
        """The bytes of each token of an answer, given its text (`trainer/model/token_bytes.py`)."""
        return self._token_bytes.of(ids, text)

    def piece(self, token: int) -> tuple[int, ...]:
        """The bytes of one token; of a special token those of its name."""
        return self._token_bytes.piece(token)

    def is_special(self, token: int) -> bool:
        """Whether a token is not part of a text."""
        return token in self._token_bytes.special

    def mark(self, text: str) -> int | None:
        """The id of the special token that this text is, or None if it is written as text."""
        ids = self.encode(text)
        return ids[0] if len(ids) == 1 and self.is_special(ids[0]) else None

    @property
    def has_reasoning(self) -> bool:
        """Whether the template knows reasoning between `<think>` and `</think>`."""
        return END_THINK in self._template

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    def answer(
        self, ids: Sequence[int], text: str, *, prompt_ids: Sequence[int], tools: Sequence[ToolSpec]
    ) -> Message | None:
        """The message that an answer is, or None if its text is all of it. `text` is the text of `ids`,
        cut at a stop string."""
        if self._family is not None and text == self.decode(ids):
            return self._family.answer(ids, prompt_ids=prompt_ids, tools=tools)
        form = call_form(self._template, is_ours=self._is_ours) if tools else None
        if form == "marked" and text == self.decode(ids):
            whole = str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
            content, calls = split_marked(self._without_end(whole))
            shown = [self._without_marks(content)] if calls else [text]
            return as_message(shown[0], calls, reasoning=None)
        reasoning = None
        if self.has_reasoning:
            reasoning, text = split_reasoning(text, is_open=self.has_open_reasoning(prompt_ids))
        content, calls = split_tagged(text) if form == "tagged" else (text, [])
        if reasoning is None and not tools:
            return None
        return as_message(content, calls, reasoning=reasoning)

    def stable_prefix(
        self,
        ids: Sequence[int],
        *,
        prompt_ids: Sequence[int],
        tools: Sequence[ToolSpec],
        stop: Sequence[str],
    ) -> str:
        """The beginning of the content of an answer that has these ids so far, as far as its next ids
        cannot change it (`trainer/model/stable_prefix.py`)."""
        if self._family is not None:
            content = self._family.settled_content(ids, prompt_ids=prompt_ids, tools=tools)
            return before_marks(whole_characters(content), stop)
        text = before_marks(whole_characters(self.decode(ids)), stop)
        form = call_form(self._template, is_ours=self._is_ours) if tools else None
        if form == "marked":
            whole = str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
            shown = before_marks(whole, (MARK,))
            return text if shown == whole else before_marks(self._without_marks(shown), stop)
        if self.has_reasoning:
            text = after_reasoning(text, is_open=self.has_open_reasoning(prompt_ids))
        return before_tagged_call(text) if form == "tagged" else text

    def settled_plain_text(self, ids: Sequence[int], *, stop: Sequence[str]) -> str:
        """The beginning of a completion without a template that its next ids cannot change."""
        return before_marks(whole_characters(self.decode(ids)), stop)

    def _without_end(self, text: str) -> str:
        """The text of a turn without the token that ends it."""
        for end in self._stop_texts:
            text = text.removesuffix(end)
        return text

    def _without_marks(self, text: str) -> str:
        """The text without special tokens that a model wrote into it."""
        return self.decode(self.encode(text))

    def has_open_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside of reasoning, because its template has begun it."""
        end = self._tokenizer.decode(list(prompt_ids[-8:]), skip_special_tokens=False)
        return str(end).rstrip().endswith(THINK)

    def prompt_ids(self, request: SampleRequest) -> list[int]:
        """The prompt of a request. It continues the sampled ids exactly if it extends them. Raises
        UserCodeError for ids that the model does not have."""
        if request.prompt is not None:
            return self._plain_prompt(request.prompt)
        if self._family is not None:
            return self._family.prompt_ids(request)
        continued = self._continuation(request) if request.history else None
        if continued is not None:
            return continued
        is_long = num_characters(request) > LONG_CHARS
        ids_of = self._encode_prompt if is_long else self._prompt_of
        return list(ids_of(request.messages, request.tools))

    def least_tokens(self, num_chars: int) -> int:
        """The fewest tokens that a text of this many characters can have. A run of unknown characters,
        which some tokenizers make into one token, counts as its characters."""
        return -(-num_chars // self._most_chars_of_a_token)

    @cached_property
    def _most_chars_of_a_token(self) -> int:
        longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        is_normalized = backend is None or backend.normalizer is not None
        return longest * COMPOSED if is_normalized else longest

    def _plain_prompt(self, prompt: str | tuple[int, ...]) -> list[int]:
        """The ids of a text without a template, with the tokens that the model puts before a text."""
        ids = list(self._tokenizer.encode(prompt)) if isinstance(prompt, str) else list(prompt)
        if not ids or max(ids) >= len(self._tokenizer):
            raise UserCodeError(
                FailureCategory.VALIDATION,
                f"the prompt must have tokens, with ids below {len(self._tokenizer)}",
            )
        return ids

    def family_ids(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, reply_next: bool
    ) -> list[int] | None:
        """The ids of a conversation as the model's family writes it, or None if no renderer knows the
        family. Raises UserCodeError when it cannot be written."""
        if self._family is None:
            return None
        return self._family.conversation_ids(messages, tools, reply_next=reply_next)

    def reply_ids(
        self, messages: Sequence[Message], reply: Message, *, tools: Sequence[ToolSpec]
    ) -> list[int]:
        """The ids that the template writes for a reply, without the one that ends its turn. They are
        empty if it does not write the messages before as it did without the reply."""
        whole = (*messages, reply)
        if self._family is not None:
            begun = self._family.conversation_ids(messages, tools, reply_next=True)
            ids = self._family.conversation_ids(whole, tools, reply_next=False)
            if ids[: len(begun)] != begun:
                return []
            ids = ids[len(begun) :]
        else:
            said = self.text(messages, tools=tools, reply_next=True)
            shown = self.text(whole, tools=tools, reply_next=False)
            if not shown.startswith(said):
                said = said.rstrip().removesuffix(THINK)
            if not shown.startswith(said):
                return []
            ids = self.encode(shown[len(said) :])
        ids = self.cut_ids_after_last_turn(ids)
        return ids[:-1] if ids and ids[-1] in self._stop_ids else ids

    def cut_ids_after_last_turn(self, ids: Sequence[int]) -> list[int]:
        """The ids up to and including the last one that ends a turn; all of them if none does."""
        ends = (place + 1 for place, number in enumerate(ids) if number in self._stop_ids)
        return list(ids[: max(ends, default=len(ids))])

    @cached_property
    def _family(self) -> FamilyRenderer | None:
        return find_renderer(self._tokenizer, self._day)

    def _encode_prompt(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]
    ) -> tuple[int, ...]:
        return tuple(self.encode(self.text(messages, tools=tools, reply_next=True)))

    def _continuation(self, request: SampleRequest) -> list[int] | None:
        """The prompt that continues the last turn of the history with the ids that were sampled, or None
        if the request does not extend it, or if the template rewrites it."""
        before, last = request.history_messages, request.history[-1]
        num_before, tools = len(before), request.tools
        if not before:  # the request continues no turn, even if it begins with the last answer
            return None
        if len(request.messages) <= num_before or request.messages[:num_before] != before:
            return None
        reply = request.messages[num_before]
        if reply != last.message:
            return None
        whole = self.text(request.messages, tools=tools, reply_next=True)
        if last.answer is None:
            said = self.text(before, tools=tools, reply_next=True) + last.text
            return self._continue(last, said, whole, closed=False)
        ended = self.text((*before, reply), tools=tools, reply_next=False)
        return self._continue(last, self.cut_after_last_turn(ended), whole, closed=True)

    def _continue(self, last: Turn, said: str, whole: str, *, closed: bool) -> list[int] | None:
        """The ids of a turn, followed by those of what comes after `said` in the template's text. With
        `closed`, `said` has the end of the turn, which an answer that was cut off has not sampled."""
        if not whole.startswith(said):
            return None
        _, suffix = self.encode_parts((said, whole[len(said) :]))
        ended = last.completion_ids[-1:]
        is_ended = bool(ended) and ended[0] in self._stop_ids
        if closed:
            end = [] if is_ended else self._end_of(said)
            return [*last.prompt_ids, *last.completion_ids, *end, *suffix]
        if is_ended and suffix[:1] == list(ended):
            suffix = suffix[1:]
        return [*last.prompt_ids, *last.completion_ids, *suffix]

    def _end_of(self, said: str) -> list[int]:
        """The id of the token that ends this text, or none if no token that ends a turn does."""
        return next(
            (
                [number]
                for number in sorted(self._stop_ids)
                if said.endswith(str(self._tokenizer.convert_ids_to_tokens(number)))
            ),
            [],
        )

    def cut_after_last_turn(self, text: str) -> str:
        """The template's text up to and including the last token that ends a turn. The text after it
        belongs to no turn."""
        ends = (text.rfind(end) + len(end) for end in self._stop_texts if end in text)
        return text[: max(ends, default=len(text))]

    def with_end_token(self, ids: Sequence[int]) -> list[int]:
        """The ids of a turn with the id that ends it. If the template has no such token, the model's own
        is added, because the policy must learn to stop."""
        is_ended = bool(ids) and ids[-1] in self._stop_ids
        return [*ids] if is_ended else [*ids, self._end_id]

    @property
    def _stop_texts(self) -> list[str]:
        return [str(self._tokenizer.convert_ids_to_tokens(i)) for i in sorted(self._stop_ids)]

    @property
    def _end_id(self) -> int:
        eos = self._tokenizer.eos_token_id
        return int(eos) if isinstance(eos, int) else min(self._stop_ids)


@lru_cache(8)
def codes_of(day: datetime) -> dict[str, str]:
    """Format code of `strftime`, with and without its flags -> its value on this day."""
    codes = [flag + code for flag in ("", *"-_0^#") for code in f"{string.ascii_letters}%"]
    return {f"%{code}": day.strftime(f"%{code}") for code in codes}


def num_characters(request: SampleRequest) -> int:
    """How many characters the conversation of a request has, with one more for each message; of a prompt
    of ids, how many ids."""
    if request.prompt is not None:
        return len(request.prompt)
    return sum(
        1
        + len(message.content)
        + len(message.reasoning or "")
        + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
        for message in request.messages
    ) + sum(len(tool.description) + len(tool.parameters) for tool in request.tools)
