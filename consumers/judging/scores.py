"""Reads the answer of a judge: a score within the scale and an explanation, or what is wrong with it.
Pure functions."""

import json
import math
import re
from dataclasses import dataclass

from schemas.specs import RubricSpec
from schemas.text import plain

LONGEST_ANSWER = 64_000
LONGEST_EXPLANATION = 2000
REFUSED = frozenset({"content_filter", "refusal"})
"""Words of providers for an answer that was withheld."""

FENCED = re.compile(r"```(?:json)?\s([^`]*)```")
NUMBER = re.compile(r"[+-]?[0-9]{1,20}(?:\.[0-9]{1,20})?")


@dataclass(frozen=True, slots=True)
class Score:
    """A score, clamped to the scale of its rubric."""

    value: float
    explanation: str


@dataclass(frozen=True, slots=True)
class Unusable:
    """The reason why an answer has no score."""

    problem: str


def read_score(text: str, rubric: RubricSpec, *, finish_reason: str = "stop") -> Score | Unusable:
    """Return the score in the answer of a judge."""
    if finish_reason in REFUSED:
        return Unusable(f"the model withheld its answer ({finish_reason})")
    if not text.strip():
        return Unusable(f"the answer is empty (finish_reason {finish_reason[:40]!r})")
    if len(text) > LONGEST_ANSWER:
        return Unusable(f"the answer has {len(text)} characters")
    document = _find_object(text)
    if document is None:
        return Unusable("the answer is not a JSON object")
    value = _number(document.get("score"))
    if value is None:
        shown = plain(json.dumps(document.get("score")))[:40]
        return Unusable(f"its score is {shown}, which is not a finite number")
    explanation = document.get("explanation")
    said = plain(explanation) if isinstance(explanation, str) else ""
    return Score(min(max(value, rubric.low), rubric.high), said[:LONGEST_EXPLANATION])


def _find_object(text: str) -> dict[str, object] | None:
    """The JSON object that an answer is, or has in a fence or between its first and last brace."""
    candidates = [text, *FENCED.findall(text)[-1:]]
    first, last = text.find("{"), text.rfind("}")
    if 0 <= first < last:
        candidates.append(text[first : last + 1])
    for candidate in candidates:
        try:
            found = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return None


def _number(value: object) -> float | None:
    """A finite number, also one that is written as text."""
    if isinstance(value, str) and NUMBER.fullmatch(value.strip()):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
