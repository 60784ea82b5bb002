"""Rewards for answers that equal the ground truth."""

import string
import unicodedata

from headrace.graders.answers import truth_of
from headrace.rewards import reward

ARTICLES = frozenset({"a", "an", "the"})
PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))


@reward
def exact_match(
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, object] | None = None,
    **kwargs: object,
) -> float:
    """Return 1.0 if the answer is the ground truth, apart from white space around it.

    >>> exact_match(" Paris\\n", "Paris")
    1.0
    >>> exact_match("paris", "Paris")
    0.0
    """
    return float(solution_str.strip() == truth_of(ground_truth))


@reward
def normalized_match(
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, object] | None = None,
    **kwargs: object,
) -> float:
    """Return 1.0 if answer and ground truth have the same words. Case, punctuation, the articles a, an
    and the, and the form of Unicode do not matter.

    >>> normalized_match("The answer: PARIS!", "the answer paris")
    1.0
    """
    return float(normalize(solution_str) == normalize(truth_of(ground_truth)))


def normalize(text: str) -> str:
    """Return the words of a text in one form. If nothing but punctuation or articles is in it, they
    stay.

    >>> normalize("The Eiffel-Tower!")
    'eiffel tower'
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    spaced = folded.translate(PUNCTUATION).split() or folded.split()
    return " ".join([word for word in spaced if word not in ARTICLES] or spaced)
