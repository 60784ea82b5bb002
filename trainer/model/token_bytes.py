"""The bytes of text that each token represents.

Tokens are not characters. One character may take several tokens, and one token alone may have no text.
So a token is reported as its bytes, from which the text can be rebuilt.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from schemas.text import bytes_of_symbol

Piece = tuple[int, ...]


class TokenBytes:
    """Finds the bytes that each token of a tokenizer represents."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        hidden = (number for number, token in added if token.special)
        self.special = frozenset((*tokenizer.all_special_ids, *hidden))
        """The ids that are not part of a text."""

    def of(self, ids: Sequence[int], text: str) -> tuple[Piece | None, ...]:
        """The bytes of each of `ids`. None for special tokens, and for tokens at the end that are not
        part of `text`, because a stop string was cut off."""
        num = len(ids)
        while num and ids[num - 1] not in self.special:
            if not self._text(ids[: num - 1]).startswith(text):
                break
            num -= 1
        shown = [self.piece(token) if token not in self.special else None for token in ids[:num]]
        return (*shown, *([None] * (len(ids) - num)))

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def piece(self, token: int) -> Piece:
        """The bytes of one token; of a special token those of its name."""
        symbol = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(symbol, str):
            return ()
        return bytes_of_symbol(symbol, is_byte_level=self._is_byte_level)

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether the characters of its symbols represent bytes (GPT-2 and most later ones)."""
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        if decoder is None:
            return False
        said = json.loads(decoder.__getstate__())
        return any(part.get("type") == "ByteLevel" for part in (said, *said.get("decoders", ())))
