"""Finds the final answer in a text by the mark in front of it, and the ground truth of a row."""

BOXED = "\\boxed{"
LONGEST_BOX = 10_000
"""The most characters in a `\\boxed{...}`; a longer one counts as none."""


def truth_of(ground_truth: str | None) -> str:
    """Return the ground truth without white space around it. Raises ValueError for a row that has
    none, because nothing can be compared with it."""
    truth = (ground_truth or "").strip()
    if not truth:
        raise ValueError("this row has no ground truth; add the column ground_truth to the dataset")
    return truth


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` whose braces are closed, or None.

    >>> last_boxed("so it is \\\\boxed{\\\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    begin = text.rfind(BOXED)
    if begin < 0:
        return None
    first, depth = begin + len(BOXED), 1
    for place in range(first, min(len(text), first + LONGEST_BOX)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return text[first:place]
    return None


def after_last(text: str, mark: str, *, most: int) -> str | None:
    """Return up to `most` characters behind the last `mark` of a text, or None if it has no mark."""
    place = text.rfind(mark)
    return None if place < 0 else text[place + len(mark) :][:most]
