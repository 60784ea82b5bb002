"""Rewards for answers that choose one of several options by its letter."""

import re

from headrace.graders.answers import last_boxed, truth_of
from headrace.rewards import reward

TAIL = 2000
"""Only this many characters at the end of an answer are searched for a letter."""

FEWEST_LETTERS = 10
"""Without a list of the options, they are A to J."""

LABELLED = re.compile(r"\A[(\[*]{0,3}([A-Za-z])[)\].:*]{0,3}(?:\s|\Z)")
NO_WORD = r"(?![AIai]\s(?-i:[a-z]))"
"""`A` and `I` before another word are words themselves."""

SAID = re.compile(
    r"(?:answer|option|choice)(?:\s(?:is|would be|must be))?[\s:*]{0,4}"
    r"(?:option\s|choice\s)?[(\[*$]{0,3}" + NO_WORD + r"([A-Za-z])(?![A-Za-z'])",
    re.IGNORECASE,
)
BRACKETED = re.compile(r"[(\[]([A-Z])[)\]]|\*\*([A-Z])[).]?\*\*")
ALONE = re.compile(r"(?<![A-Za-z0-9'])" + NO_WORD + r"([A-Z])(?![A-Za-z0-9'])")


@reward
def multiple_choice(
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, object] | None = None,
    **kwargs: object,
) -> float:
    """Return 1.0 if the answer chooses the option of the ground truth.

    The ground truth is a letter (`B`, `(B)` or `B. Paris`), or the text of an option if the row's
    metadata has the list `choices`. The letter of an answer is the one in its last `\\boxed{}`, else
    behind the last "answer is", else the last one in brackets, else the last one that stands alone.

    >>> multiple_choice("It cannot be A, so the answer is (B).", "B")
    1.0
    >>> multiple_choice("C", "Rome", {"choices": ["Paris", "Oslo", "Rome"]})
    1.0
    """
    listed = (extra_info or {}).get("choices")
    choices = [str(one) for one in listed] if isinstance(listed, (list, tuple)) else []
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(choices) or FEWEST_LETTERS]
    return float(
        chosen_letter(solution_str, letters) == _true_letter(ground_truth, choices, letters)
    )


def chosen_letter(text: str, letters: str) -> str | None:
    """Return the letter that a text chooses, or None.

    >>> chosen_letter("The answer is **C**.", "ABCD")
    'C'
    """
    boxed = last_boxed(text)
    if boxed is not None and (inside := _last(ALONE, boxed[:TAIL].upper(), letters)):
        return inside
    tail = " ".join(text[-TAIL:].split())
    if len(text) <= TAIL and (alone := LABELLED.search(tail)) and len(tail) <= 4:
        return alone[1].upper() if alone[1].upper() in letters else None
    for pattern in (SAID, BRACKETED, ALONE):
        if found := _last(pattern, tail, letters):
            return found
    return None


def _last(pattern: re.Pattern[str], text: str, letters: str) -> str | None:
    found = [
        letter
        for match in pattern.finditer(text)
        if (letter := next(filter(None, match.groups())).upper()) in letters
    ]
    return found[-1] if found else None


def _true_letter(ground_truth: str, choices: list[str], letters: str) -> str:
    truth = truth_of(ground_truth)
    if truth in choices:
        return letters[choices.index(truth)]
    labelled = LABELLED.search(truth)
    if labelled is None or labelled[1].upper() not in letters:
        raise ValueError(
            f"the ground truth {truth[:80]!r} is none of the letters {letters[0]} to {letters[-1]}; "
            "give a letter, or the list `choices` in the row's metadata"
        )
    return labelled[1].upper()
