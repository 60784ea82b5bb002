"""The tokens of an answer as spans of text with a colour each.

Neighbouring tokens of one colour are one span, so a page stays small. The text is that of the tokens as
they were sampled, special tokens included. A character of several tokens belongs to the last of them,
and bytes that are not a character are replaced.
"""

from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from schemas.learner import requested_rows
from schemas.sampling import SampleRecord, Sequence

COLOURS = ("none", "logprob", "advantage", "trained")
STEPS = 8
LOGPROBS = (-0.01, -0.05, -0.2, -0.5, -1.0, -2.0, -4.0)
"""Where a shade of a logprob ends and the next one begins."""

SPAN_CHARACTERS = 25
"""Characters of the markup of a span."""

UTF8 = getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class ColourSpan:
    """A stretch of text in one colour. Without a colour its name is empty."""

    text: str
    colour: str


@dataclass(frozen=True, slots=True)
class TokenStretch:
    """Neighbouring tokens of one row that the policy chose (`is_sampled`), or that it was given. `left`
    counts the tokens at the end that are not shown."""

    is_sampled: bool
    spans: tuple[ColourSpan, ...]
    left: int


def num_stretches(record: SampleRecord) -> int:
    """How many stretches of tokens a sample has."""
    return sum(len(list(groupby(row.loss_mask))) for row in record.sequences)


def stretches(
    record: SampleRecord,
    vocabulary: Mapping[int, bytes],
    *,
    colour: str,
    advantage: float = 0.0,
    most: int | None = None,
) -> list[TokenStretch] | None:
    """The tokens of a sample, without the prompt of each row, and its rows in the order of their first
    requests. `advantage` is the sample's part of the largest one in its group, from -1 to 1. At most
    about `most` characters of each stretch are shown, with the markup of its spans. None when a token
    is not in the vocabulary, so that it is of another tokenizer."""
    found: list[TokenStretch] = []
    for row in (record.sequences[number] for number in requested_rows(record)):
        if not all(token in vocabulary for token in row.tokens):
            return None
        places = range(len(row.tokens))
        for sampled, group in groupby(places, key=row.loss_mask.__getitem__):
            part = list(group)
            if not sampled and part[0] == 0:
                continue
            pieces = (
                (vocabulary[row.tokens[place]], _colour(row, place, colour, advantage))
                for place in part
            )
            spans, shown = _merge(pieces, most)
            found.append(TokenStretch(bool(sampled), spans, len(part) - shown))
    return found


def _colour(row: Sequence, place: int, colour: str, advantage: float) -> str:
    if not row.loss_mask[place]:
        return ""
    match colour:
        case "logprob":
            return logprob_shade(row.logprobs[place])
        case "advantage":
            return advantage_shade(advantage)
        case _:
            return "trained"


def logprob_shade(logprob: float) -> str:
    """The class of a logprob. The likeliest tokens have none."""
    step = sum(logprob < bound for bound in LOGPROBS)
    return f"p{step}" if step else ""


def advantage_shade(part: float) -> str:
    """The class of an advantage that is this part of the largest one, from -1 to 1: four shades below
    0 and four above. 0 has none."""
    if part == 0:
        return ""
    step = min(STEPS // 2, 1 + int(abs(part) * STEPS / 2))
    return f"{'up' if part > 0 else 'down'}{step}"


def _merge(
    pieces: Iterator[tuple[bytes, str]], most: int | None
) -> tuple[tuple[ColourSpan, ...], int]:
    """Neighbouring pieces of one colour as one span each, and how many pieces are shown."""
    decoder, parts, shown, cost = UTF8(errors="replace"), list[tuple[str, list[str]]](), 0, 0
    for piece, name in pieces:
        if most is not None and cost >= most:
            break
        shown += 1
        text = decoder.decode(piece)
        if not text:
            continue
        if not parts or parts[-1][0] != name:
            parts.append((name, []))
            cost += SPAN_CHARACTERS if name else 0
        parts[-1][1].append(text)
        cost += len(text)
    if rest := decoder.decode(b"", final=True):
        parts.append(("", [rest]))
    return tuple(ColourSpan("".join(texts), name) for name, texts in parts), shown


def legend(colour: str) -> tuple[tuple[str, str], ...]:
    """The classes of a colour, each with its meaning in words."""
    match colour:
        case "logprob":
            first, last = LOGPROBS[0], LOGPROBS[-1]
            between = ((f"p{n + 1}", f"to {bound}") for n, bound in enumerate(LOGPROBS[1:]))
            return (("", f"from 0 to {first}"), *between, ("p7", f"less than {last}"))
        case "advantage":
            down = ((f"down{step}", f"-{step / 4:.0%}") for step in (4, 3, 2, 1))
            up = ((f"up{step}", f"+{step / 4:.0%}") for step in (1, 2, 3, 4))
            return (*down, ("", "0"), *up)
        case "trained":
            return (("trained", "trained: chosen by the policy"), ("", "not trained: given to it"))
        case _:
            return ()
