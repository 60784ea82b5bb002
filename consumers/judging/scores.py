"""Reads the answer of a judge: a score within the scale and an explanation, or what is wrong with it.
Pure functions.

A judge may quote the text that it scores, and that text may hold an object like `{"score": 1.0}`. So an
answer that is one object and nothing else is the judgement. In any other answer the objects that also
occur in the material are not the judge's. Nor is one that the material has in another form: with its
keys in another order or with more of them, or within a string. Of the others the one that ends last is
the judgement. The answer is not used if their scores differ, or if it has a score outside of its
objects.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.specs import RubricSpec
from schemas.text import plain

LONGEST_ANSWER = 64_000
LONGEST_EXPLANATION = 2000
REFUSED = frozenset({"content_filter", "refusal"})
"""Words of providers for an answer that was withheld."""

CUT = "length"
"""The word of providers for an answer that ended at its limit of tokens."""

MOST_UNREAD = 1_000_000
"""How many characters may follow the places where objects begin that cannot be read, added up. To read
on at each of them takes longer than the answer is long; an answer may have LaTeX or Python in it."""

MOST_OBJECTS = 200

MOST_COMPARED = 50_000
"""Only the texts are compared above so many pairs of an object of the answer and one of the material,
which take a tenth of a second."""

BEGIN = re.compile(r"\{(?=\s*[\"}])")
"""Where an object may begin. Most other braces are not tried at all."""

AROUND = re.compile(r"\s*(?:```(?:json)?)?\s*(?:```)?\s*")
"""All that may be around an object that is the whole answer: white space and a fence of Markdown."""

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


def read_score(
    text: str, rubric: RubricSpec, *, material: str = "", finish_reason: str = "stop"
) -> Score | Unusable:
    """Return the score in the answer of a judge that was asked about `material`."""
    document = _read_verdict(text, material, key="score", finish_reason=finish_reason)
    if isinstance(document, Unusable):
        return document
    value = _number(document.get("score"))
    if value is None:
        shown = plain(json.dumps(document.get("score")))[:40]
        return Unusable(f"its score is {shown}, which is not a finite number")
    return _score(value, document.get("explanation"), rubric)


def read_scores(
    text: str,
    rubric: RubricSpec,
    *,
    num_answers: int,
    material: str = "",
    finish_reason: str = "stop",
) -> tuple[Score, ...] | Unusable:
    """Return the scores in the answer of a judge that compared the answers of a group, in the order of
    their numbers. Each answer needs one score, and one that lacks it makes all of them unusable,
    because a judge that miscounts may have given them to others."""
    document = _read_verdict(text, material, key="scores", finish_reason=finish_reason)
    if isinstance(document, Unusable):
        return document
    given = document.get("scores")
    if not isinstance(given, list):
        return Unusable("its scores are not a list")
    found: dict[int, Score] = {}
    for one in given[: num_answers + 1]:
        if not isinstance(one, dict):
            return Unusable("its scores are not objects")
        number, value = _number(one.get("answer")), _number(one.get("score"))
        if number is None or number not in range(1, num_answers + 1):
            shown = plain(json.dumps(one.get("answer")))[:40]
            return Unusable(f"it scores answer {shown}, and they are numbered 1 to {num_answers}")
        if number in found:
            return Unusable(f"it scores answer {number:g} twice")
        if value is None:
            shown = plain(json.dumps(one.get("score")))[:40]
            return Unusable(
                f"its score of answer {number:g} is {shown}, which is not a finite number"
            )
        found[int(number)] = _score(value, one.get("explanation"), rubric)
    missing = [number for number in range(1, num_answers + 1) if number not in found]
    if missing:
        return Unusable(f"it has no score of answer {', '.join(map(str, missing[:10]))}")
    return tuple(found[number] for number in range(1, num_answers + 1))


def _read_verdict(
    text: str, material: str, *, key: str, finish_reason: str
) -> Mapping[str, object] | Unusable:
    if finish_reason in REFUSED:
        return Unusable(f"the model withheld its answer ({finish_reason})")
    if not text.strip():
        return Unusable(f"the answer is empty (finish_reason {finish_reason[:40]!r})")
    if len(text) > LONGEST_ANSWER:
        return Unusable(f"the answer has {len(text)} characters")
    return _find_verdict(text, material, key=key, is_cut=finish_reason == CUT)


def _score(value: float, explanation: object, rubric: RubricSpec) -> Score:
    said = plain(explanation) if isinstance(explanation, str) else ""
    return Score(min(max(value, rubric.low), rubric.high), said[:LONGEST_EXPLANATION])


def _find_verdict(
    text: str, material: str, *, key: str, is_cut: bool
) -> Mapping[str, object] | Unusable:
    """The object in which a judge gives its score under this key, or why there is none."""
    parts = _split(text)
    if parts is None:
        return Unusable("the answer has too many braces or JSON objects")
    found, rest = parts
    if len(found) == 1 and AROUND.fullmatch(rest):
        return found[0][1]
    if is_cut:
        return Unusable("the answer was cut off at its limit of tokens")
    if not found:
        return Unusable("the answer is not a JSON object")
    if f'"{key}"' in rest:
        return Unusable("the answer has a score outside of a JSON object")
    quotable = _compact(material)
    own = [said for source, said in found if _compact(source) not in quotable]
    scores = {_comparable(said[key]) for said in own if key in said}
    if len(scores) > 1:
        return Unusable(f"the answer has {len(scores)} JSON objects with different scores")
    objects = _objects(material)
    if len(own) * len(objects) <= MOST_COMPARED:
        own = [said for said in own if not any(_is_part(said, of=one) for one in objects)]
    if not own:
        return Unusable("the answer only quotes JSON of the material")
    return next((said for said in reversed(own) if key in said), own[-1])


def _comparable(value: object) -> str:
    """A score, or scores, as text. Equal ones have equal texts."""
    if isinstance(value, list):
        return json.dumps(value, sort_keys=True)
    return repr(_number(value))


def _split(text: str) -> tuple[list[tuple[str, Mapping[str, object]]], str] | None:
    """The JSON objects of a text that lie in no other object, in their order with their sources, and
    the text around them. Returns None if reading them would take long."""
    found, rest, kept, unread = [], [], 0, 0
    begin = BEGIN.search(text)
    while begin:
        start = begin.start()
        try:
            said, end = DECODER.raw_decode(text, start)
        except ValueError:
            end = start + 1
            unread += len(text) - start
        except RecursionError:
            break  # every brace within would be tried as deeply again
        else:
            found.append((text[start:end], said))
            rest.append(text[kept:start])
            kept = end
        if unread > MOST_UNREAD or len(found) > MOST_OBJECTS:
            return None
        begin = BEGIN.search(text, end)
    return found, "".join([*rest, text[kept:]])


def _objects(material: str) -> list[Mapping[str, object]]:
    """The JSON objects of the material, also those in others and in its strings. Empty if reading them
    would take long."""
    objects: list[Mapping[str, object]] = []
    for text in (material, material.replace('\\"', '"')):
        parts = _split(text)
        waiting: list[object] = [] if parts is None else [said for _, said in parts[0]]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                objects.append(value)
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value
    return objects


def _is_part(said: Mapping[str, object], *, of: Mapping[str, object]) -> bool:
    """Whether an object has all that another says, as numbers and texts, and not as they are written."""
    try:
        return all(key in of and of[key] == value for key, value in said.items())
    except RecursionError:  # lists in lists
        return False


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON. Raises ValueError if a key occurs twice."""
    said = dict(pairs)
    if len(said) < len(pairs):
        raise ValueError("a key occurs twice")
    return said


DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)


def _compact(text: str) -> str:
    return "".join(text.split())


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
