"""Long prompts: refused by their characters before they are tokenised, or tokenised on another thread.

Tokenising takes some hundred bytes of memory for each token and a second for a few million characters.
So a prompt that cannot fit is never tokenised, and of those that may fit a long one is tokenised on a
thread of its own, one at a time. A grammar is built there too, which may take more than a second.
Otherwise one client would hold up the answers of all others.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from schemas.errors import FailureCategory, UserCodeError
from schemas.sampling import SampleRequest
from trainer.model.chat_template import Chat, num_characters
from trainer.model.family_renderer import LONG_CHARS

T = TypeVar("T")

APART = ThreadPoolExecutor(1, "long-prompts")


def refuse_too_long(request: SampleRequest, chat: Chat, *, context: int) -> None:
    """Raise UserCodeError(PROMPT_TOO_LONG) when a prompt has so many characters that it cannot fit,
    whatever its tokens are."""
    num_chars = num_characters(request)
    least = chat.least_tokens(num_chars)
    if least > longest_prompt(request, context=context):
        raise too_long(request, f"{num_chars} characters, so at least {least}", context=context)


def longest_prompt(request: SampleRequest, *, context: int) -> int:
    """How many tokens a prompt may have, for a model that has `context` positions."""
    return min(request.params.max_prompt_tokens, context - 1)


def too_long(request: SampleRequest, what: str, *, context: int) -> UserCodeError:
    """The error for a prompt with `what` tokens."""
    longest = longest_prompt(request, context=context)
    advice = ", or raise max_prompt_length" if longest < context - 1 else ""
    return UserCodeError(
        FailureCategory.PROMPT_TOO_LONG,
        f"the prompt has {what} tokens; at most {longest} fit. Shorten it{advice}",
    )


async def prepare_apart(request: SampleRequest, work: Callable[[], T]) -> T:
    """Return the result of `work`, which tokenises the prompt of a request and builds the grammar of its
    answer."""
    if num_characters(request) <= LONG_CHARS and request.constraint is None:
        return work()
    return await asyncio.get_running_loop().run_in_executor(APART, work)


async def count_tokens(request: SampleRequest, chat: Chat, *, context: int) -> int:
    """How many tokens the prompt of a request has. Raises UserCodeError(PROMPT_TOO_LONG) when it has so
    many characters that it cannot fit."""
    most = request.params.model_copy(update={"max_prompt_tokens": context})
    refuse_too_long(request.model_copy(update={"params": most}), chat, context=context)
    return await prepare_apart(request, lambda: len(chat.prompt_ids(request)))
