"""The part of an unfinished answer that its next tokens cannot change.

A client that streams gets text while it is sampled, and nothing can be taken back. So these are held
back until they are certain: bytes that may become a character, the beginning of a stop string,
reasoning, and everything from the beginning of a tool call on. Text that was held back and turns out to
be plain is sent with the end of the answer.
"""

from collections.abc import Sequence

from trainer.model.tool_calls import TAG, THINK, split_reasoning

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""The character that incomplete bytes decode to."""


def before_marks(text: str, marks: Sequence[str]) -> str:
    """Return the text before the first of the marks, and before the beginning of one at its end. What
    comes before a whole mark is certain, also if it looks like the beginning of another."""
    found = [at for mark in marks if (at := text.find(mark)) >= 0]
    sizes = (size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size]))
    begun = len(text) - max(sizes, default=0)
    return text[: min(*found, begun)] if found else text[:begun]


def whole_characters(text: str) -> str:
    """Return the text without bytes at its end that may still become a character."""
    return text.rstrip(UNKNOWN)


def after_reasoning(text: str, *, is_open: bool) -> str:
    """Return what follows the reasoning of an answer. `is_open`: the prompt has begun the reasoning."""
    reasoning, rest = split_reasoning(text, is_open=is_open)
    may_begin = reasoning is None and THINK.startswith(text.lstrip())
    return "" if may_begin else rest


def before_tagged_call(text: str) -> str:
    """Return the text before the first tagged call. White space around it is cut if a call follows, so
    an answer that begins with white space is held back."""
    shown = before_marks(text, (TAG,)).rstrip()
    return "" if shown[:1].isspace() else shown
