"""Tells the text of an answer while it is sampled.

All ids are decoded again each time, so the text is exactly the beginning of the final text, whatever
the tokenizer does. That is done after each token at first, and more rarely as the answer grows, so that
its cost stays a small part of sampling.
"""

import logging
import sys

from schemas.sampling import Tell
from trainer.sampler.completion import Completion

logger = logging.getLogger(__name__)

PIECES = 128
"""A piece has at most a part of 1 / PIECES of the tokens before it, or one token if that is more."""


class PartialText:
    """The part of an answer that `tell` was called with."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told = ""
        self._next = 1

    def update(self, row: Completion) -> None:
        """Tell what was sampled since the last call. The end of an answer is left out, because the
        caller gets it with the turn. When another server samples an answer again, this goes on where the
        first one broke off."""
        num = len(row.completion_ids)
        if num < self._next or row.is_over:
            return
        self._next = num + max(1, num // PIECES)
        try:
            text = row.stable_prefix()
        except Exception as error:  # a renderer may fail on unfinished ids; the end tells it all
            logger.warning("the text of an unfinished answer cannot be told: %r", error)
            self._next = sys.maxsize
            return
        if len(text) > len(self._told) and text.startswith(self._told):
            piece, self._told = text[len(self._told) :], text
            self._tell(piece)
