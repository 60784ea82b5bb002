"""Chats of model families that the package `renderers` knows.

A renderer is a chat template as a program: it writes the ids of a conversation, finds reasoning and
calls in sampled ids by the tokens that mark them, and continues sampled ids with new messages. It is
chosen by the public name of the model, which must be one that the package lists. Checkpoints of such a
model carry the name in their tokenizer. Other directories may have another template, so they keep it.
"""

import logging
import re
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from schemas.errors import FailureCategory, UserCodeError
from schemas.sampling import Message, SampleRequest, ToolSpec, Turn
from schemas.text import well_formed
from trainer.model.stable_prefix import before_marks, whole_characters
from trainer.model.tool_calls import (
    TAG,
    THINK,
    FoundCall,
    arguments_text,
    as_message,
    template_message,
    template_tool,
)

logger = logging.getLogger(__name__)

PUBLIC_NAME = re.compile(r"[\w.-]+/[\w.-]+")
NAME_KEY = "headrace_base_model"
"""The key of the public name in a tokenizer's `tokenizer_config.json`."""

KEPT, LONG_CHARS = 64, 128 << 10
"""The ids of how many conversations are cached, and how many characters each may have."""

DATES = {
    "llama-3": ("date_string", "%d %b %Y"),
    "gpt-oss": ("conversation_start_date", "%Y-%m-%d"),
}
"""The option by which a family gets the current date, and its format. No other family writes a date."""

HEADERS = {"llama-3": "<|end_header_id|>"}
"""The token after which a family's answer begins. The renderer drops all that was said before it, so
where a policy draws it inside an answer it is left out."""

IN_CHANNELS = frozenset({"gpt-oss", "inkling", "gemma4"})
"""Families whose answers have several channels. The end of an answer decides which text is its content,
so nothing of it is sent before."""


class Renderer(Protocol):
    """The part of `renderers.Renderer` that is used here."""

    def render_ids(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]: ...

    def parse_response(
        self, token_ids: list[int], *, tools: Any = None, prompt_ids: list[int] | None = None
    ) -> Any: ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Any,
        *,
        tools: Any = None,
    ) -> Any: ...


def record_name(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Record the public name of a model in its tokenizer, whose saved files then have it as well."""
    tokenizer.init_kwargs[NAME_KEY] = name


def find_renderer(tokenizer: PreTrainedTokenizerBase, day: datetime) -> "FamilyRenderer | None":
    """The renderer of the model that this tokenizer belongs to, with `day` as its current date. None if
    its family is not known, or if its renderer needs a file that is not available. Only a recorded name
    counts, because the path of a directory may look like a public name. The package is imported only
    for models with a public name, because that takes half a second."""
    name = str(tokenizer.init_kwargs.get(NAME_KEY) or "")
    if not PUBLIC_NAME.fullmatch(name):
        return None
    from renderers.base import MODEL_RENDERER_MAP, MULTIMODAL_MODELS, create_renderer

    if name not in MODEL_RENDERER_MAP or name in MULTIMODAL_MODELS:
        return None
    tokenizer.name_or_path = name
    option, form = DATES.get(MODEL_RENDERER_MAP[name], (None, ""))
    options = {option: day.strftime(form)} if option else None
    try:
        renderer = create_renderer(tokenizer, chat_template_kwargs=options)
        family = MODEL_RENDERER_MAP[name]
        header = tokenizer.get_vocab().get(HEADERS.get(family, ""))
        return FamilyRenderer(renderer, is_streamed=family not in IN_CHANNELS, header=header)
    except Exception as error:  # the renderer of gpt-oss downloads its vocabulary
        logger.warning("%s keeps its chat template, because its renderer failed: %r", name, error)
        return None


class FamilyRenderer:
    """A renderer with our types. `is_streamed`: the content of an answer can be told before its
    end. `header` is the id that is left out of answers."""

    def __init__(
        self, renderer: Renderer, *, is_streamed: bool = True, header: int | None = None
    ) -> None:
        self._renderer = renderer
        self._is_streamed = is_streamed
        self._header = header
        self._rendered = lru_cache(KEPT)(self._render)

    def prompt_ids(self, request: SampleRequest) -> list[int]:
        """The prompt of a request. It continues the sampled ids exactly if it extends them and the
        family allows it. Raises UserCodeError when the messages cannot be written."""
        continued = self._continuation(request) if request.history else None
        if continued is not None:
            return continued
        is_long = sum(len(one.content) for one in request.messages) > LONG_CHARS
        render = self._render if is_long else self._rendered
        return list(render(request.messages, request.tools))

    def answer(
        self, ids: Sequence[int], *, prompt_ids: Sequence[int], tools: Sequence[ToolSpec]
    ) -> Message:
        """The message that sampled ids are. A call that is not well-formed stays in the content, and so
        do all calls if no tools were offered."""
        found = self._parse(ids, prompt_ids, tools)
        calls, rest = [], [str(found.content or "")]
        for call in found.tool_calls:
            if tools and call.name and call.status in ("ok", "unknown_tool"):
                name = well_formed(str(call.name))
                arguments = {} if call.arguments is None else call.arguments
                calls.append(FoundCall(name, arguments_text(arguments)))
            else:
                rest.append(str(call.raw))
        return as_message("".join(rest), calls, reasoning=found.reasoning_content)

    def settled_content(
        self, ids: Sequence[int], *, prompt_ids: Sequence[int], tools: Sequence[ToolSpec]
    ) -> str:
        """The beginning of the content of an answer that has these ids so far, as far as its next ids
        cannot change it. With tools it ends before everything that may begin a call: `<` in any place,
        or a bracket at the beginning."""
        if not self._is_streamed:
            return ""
        found = self._parse(ids, prompt_ids, tools)
        # White space is cut at the end, and incomplete bytes may become white space.
        content = whole_characters(str(found.content or "")).rstrip()
        shown = content.partition("<")[0] if tools else before_marks(content, (THINK, TAG))
        return "" if shown[:1] in {"{", "["} or shown[:1].isspace() else shown.rstrip()

    def _parse(
        self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[ToolSpec]
    ) -> Any:
        said = [one for one in ids if one != self._header]
        return self._renderer.parse_response(said, tools=_tools(tools), prompt_ids=list(prompt_ids))

    def conversation_ids(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, reply_next: bool
    ) -> list[int]:
        """The ids of a conversation. With `reply_next` it ends where the assistant begins. Raises
        UserCodeError when the messages cannot be written."""
        try:
            return list(
                self._renderer.render_ids(
                    _messages(messages), tools=_tools(tools), add_generation_prompt=reply_next
                )
            )
        except (ValueError, TypeError, KeyError) as error:
            raise UserCodeError(
                FailureCategory.VALIDATION,
                f"the model's chat format rejects these messages: {error}",
            ) from error

    def _render(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]
    ) -> tuple[int, ...]:
        return tuple(self.conversation_ids(messages, tools, reply_next=True))

    def _continuation(self, request: SampleRequest) -> list[int] | None:
        before, last = request.history_messages, request.history[-1]
        size = len(before)
        if not before:  # the request continues no turn, even if it begins with the last answer
            return None
        if len(request.messages) <= size or request.messages[:size] != before:
            return None
        if request.messages[size] != last.message:
            return None
        new = request.messages[size + 1 :]
        bridged = self._bridge(last, new, request.tools) if new else None
        own = [*last.prompt_ids, *last.completion_ids]
        return bridged if bridged is not None and bridged[: len(own)] == own else None

    def _bridge(
        self, last: Turn, new: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int] | None:
        try:
            bridged = self._renderer.bridge_to_next_turn(
                list(last.prompt_ids),
                list(last.completion_ids),
                _messages(new),
                tools=_tools(tools),
            )
        except (ValueError, TypeError, KeyError):
            return None  # rendering all of it says why
        return None if bridged is None else list(getattr(bridged, "token_ids", bridged))


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [template_message(message, is_ours=False) for message in messages]


def _tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]] | None:
    return [template_tool(tool) for tool in tools] or None
