"""Encodes texts that follow one another, so that each has the ids that it has in the whole text.

Tokenizers like SentencePiece (Llama 2, Mistral 7B v0.1) put a space before their input. Encoded by
itself, an answer then begins with a "▁" that it does not have after its context. So the whole text is
encoded, and its ids are cut where one text ends and the next begins. A token may reach over such a
boundary: a context and the first character of an answer can be one token. Then the texts on its two
sides are encoded separately, the second as a continuation, because that is what sampling would have
seen.

A tokenizer that puts nothing before its input encodes each text by itself. With byte-level BPE that
gives the same ids, and no boundaries need to be found.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from transformers import PreTrainedTokenizerBase

ANCHORS = ("\n", "a", ".", "0")
"""Texts to put before a continuation. At least one of them never forms a token with its beginning."""

PROBES = ("a", "0", "\n")


def prepends(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text has other ids at the beginning than after another text."""
    return any(ids_behind(tokenizer, probe) != _encode(tokenizer, probe) for probe in PROBES)


def ids_of_parts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text. Together they are the ids of the joined texts, except where a token reaches
    from one text into the next."""
    found: list[list[int]] = []
    while len(found) < len(texts):
        found += _first(tokenizer, texts[len(found) :], begins=not found)
    return found


def _first(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, begins: bool
) -> list[list[int]]:
    """The ids of the first texts (at least one), up to where a token reaches into the next. `begins`:
    no text comes before them."""
    whole, ends = "".join(texts), list(accumulate(map(len, texts)))[:-1]
    anchor = None if begins else _anchor(tokenizer, whole)
    if anchor is not None:
        whole, ends = anchor + whole, [len(anchor), *(len(anchor) + end for end in ends)]
    ids, places = _places(tokenizer, whole, ends)
    first, *inner = (0, *places) if anchor is None else places
    if None in inner:
        return _first(tokenizer, texts[: inner.index(None) + 1], begins=begins)
    cuts = [first or 0, *(place or 0 for place in inner), len(ids)]
    return [ids[a:b] for a, b in pairwise(cuts)]


def _anchor(tokenizer: PreTrainedTokenizerBase, text: str) -> str | None:
    """An anchor after which this text can be encoded; None if there is none."""
    for anchor in ANCHORS:
        _, [place] = _places(tokenizer, anchor + text, [len(anchor)])
        if place is not None:
            return anchor
    return None


def ids_behind(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text that continues another text."""
    [ids] = _first(tokenizer, [text], begins=False)
    return ids


def _places(
    tokenizer: PreTrainedTokenizerBase, text: str, ends: Sequence[int]
) -> tuple[list[int], list[int | None]]:
    """The ids of a text, and how many of them come before each position in `ends` (in characters). The
    number is None where one id lies on both sides of the position."""
    if not tokenizer.is_fast:
        ids = _encode(tokenizer, text)
        return ids, [_prefix(ids, _encode(tokenizer, text[:end])) for end in ends]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans: list[tuple[int, int]] = encoded["offset_mapping"]
    return list(encoded["input_ids"]), list(_between(spans, ends))


def _between(spans: Sequence[tuple[int, int]], ends: Sequence[int]) -> Iterator[int | None]:
    starts = list(accumulate((start for start, _ in spans), max))
    reach = [0, *accumulate((end for _, end in spans), max)]
    for end in ends:
        place = bisect_left(starts, end)
        yield place if reach[place] <= end else None


def _prefix(ids: Sequence[int], first: Sequence[int]) -> int | None:
    return len(first) if list(ids[: len(first)]) == list(first) else None


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
