"""Texts that follow one another -> the ids of each, as they stand in the ids of the whole.

Tokenizers in the manner of SentencePiece (Llama 2, Mistral 7B v0.1) put a space before what they are
given. Encoded by itself, an answer then begins with a "▁" that it does not have behind its context. So
the whole is encoded, and its ids are cut where one text ends and the next begins. Where a token reaches
over such a place (a context and the first character of an answer can be one token), the texts on its
two sides are encoded apart, the second as what goes on: that is what sampling would have seen.

A tokenizer that puts nothing before its text is given each text by itself: with byte-level BPE that
gives the same ids, and no places need to be found.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from transformers import PreTrainedTokenizerBase

ANCHORS = ("\n", "a", ".", "0")
"""Texts to encode another behind; one of them makes no token with its beginning."""

PROBES = ("a", "0", "\n")


def prepends(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text has other ids at the beginning than behind another text."""
    return any(_behind(tokenizer, probe) != _encode(tokenizer, probe) for probe in PROBES)


def ids_of_parts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text. Together they are those of the texts joined, but where a token reaches from
    one text into the next."""
    found: list[list[int]] = []
    while len(found) < len(texts):
        found += _first(tokenizer, texts[len(found) :], begins=not found)
    return found


def _first(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, begins: bool
) -> list[list[int]]:
    """The ids of the first texts, of one at least, up to where a token reaches into the next. `begins`:
    nothing stands before them."""
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
    """A text that this one can be encoded behind."""
    for anchor in ANCHORS:
        _, [place] = _places(tokenizer, anchor + text, [len(anchor)])
        if place is not None:
            return anchor
    return None


def _behind(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text that goes on."""
    [ids] = _first(tokenizer, [text], begins=False)
    return ids


def _places(
    tokenizer: PreTrainedTokenizerBase, text: str, ends: Sequence[int]
) -> tuple[list[int], list[int | None]]:
    """The ids of a text, and how many of them lie before each of these characters: None where one lies
    on both sides."""
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
