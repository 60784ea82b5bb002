"""Rewards for answers that are numbers."""

import re
from fractions import Fraction

from headrace.graders.answers import after_last, last_boxed, truth_of
from headrace.rewards import reward

MARK = "####"
MOST_AFTER_MARK = 300
TAIL = 10_000
"""Only this many characters at the end of an answer are searched for its last number."""

MOST_DIGITS = 100
"""A longer number is not an answer, and comparing it would take long."""

NUMBER = re.compile(
    r"(?P<minus>(?<![0-9A-Za-z.)])[-\u2212])? ?[$\u20ac\u00a3\u00a5]? ?"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?P<part>(?<=[0-9])\.[0-9]+|(?<![0-9])\.[0-9]+)?"
    r"(?:/(?P<below>[0-9]+)(?![0-9.]))?"
)
RELATIVE = Fraction(1, 10**6)
"""How far a number may be from a ground truth that is not an integer, relative to it."""


@reward
def gsm8k(
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, object] | None = None,
    **kwargs: object,
) -> float:
    """Return 1.0 if the final number of the answer is that of the ground truth, as in GSM8K.

    The final number is the one behind the last `####`. Without that mark it is the one in the last
    `\\boxed{}`, and otherwise the last number of the text. Signs of currencies, percent, units and the
    commas of thousands do not matter. The ground truth may be a whole solution that ends in `#### 18`.

    >>> gsm8k("She earns 9 * 2 = $18 every day.\\n#### 18", "18")
    1.0
    >>> gsm8k("That makes 1,234.50 dollars", "#### 1234.5")
    1.0
    """
    truth = final_number(truth_of(ground_truth))
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth[:80]!r} holds no number; gsm8k needs one")
    found = final_number(solution_str)
    if found is None:
        return 0.0
    allowed = 0 if truth.denominator == 1 else abs(truth) * RELATIVE
    return float(abs(found - truth) <= allowed)


def final_number(text: str) -> Fraction | None:
    """Return the final number of a solution, or None if it has none.

    >>> final_number("3 + 4 = 7, so 7 apples")
    Fraction(7, 1)
    >>> final_number("no number") is None
    True
    """
    marked = after_last(text, MARK, most=MOST_AFTER_MARK)
    if marked is not None:
        return next(iter(_numbers(marked)), None)
    boxed = last_boxed(text)
    if boxed is not None and (inside := _numbers(boxed)):
        return inside[-1]
    found = _numbers(text[-TAIL:])
    return found[-1] if found else None


def _numbers(text: str) -> list[Fraction | None]:
    """The numbers of a text in order; None for one that is too long."""
    return [_parse(m) for m in NUMBER.finditer(text) if m["whole"] or m["part"]]


def _parse(match: re.Match[str]) -> Fraction | None:
    whole = (match["whole"] or "0").replace(",", "")
    part, below = match["part"] or "", match["below"] or "1"
    if len(whole) + len(part) > MOST_DIGITS or len(below) > MOST_DIGITS or not int(below):
        return None
    value = Fraction(whole + part) / int(below)
    return -value if match["minus"] else value
