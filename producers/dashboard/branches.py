"""The branches of a sample as tabs: conversations that part from each other, for example sub-agents.

A tab is a link, so it works without scripts, and a page has the text of one branch only.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.errors import InvalidConfig, Issue
from schemas.sampling import Message, SampleRecord

RETURNED = 0
"""The number of the conversation that the workflow returned, if it is not one of the branches."""

TABS = 9
"""How many tabs a sample has at once. A sample may have hundreds of branches."""

BRANCH = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class BranchChoice:
    """The branch of one sample (its index) that an address names, counted from 1."""

    sample: int
    number: int


def parse_choice(text: str) -> BranchChoice | None:
    """Return the choice of `INDEX.BRANCH`, or None for an empty text. Raises InvalidConfig."""
    if not text:
        return None
    found = BRANCH.fullmatch(text)
    if found is None:
        message = f"must be a sample and its branch like 0.2, got {text[:20]!r}"
        raise InvalidConfig(f"branch {message}", issues=(Issue("branch", message),))
    return BranchChoice(sample=int(found[1]), number=int(found[2]))


def shown_branch(
    record: SampleRecord, choice: BranchChoice | None
) -> tuple[int, tuple[Message, ...]]:
    """Return the number and the messages of the branch to show: the chosen one if the sample has it, and
    else the conversation that its grader reads."""
    branches = record.branches
    if choice and choice.sample == record.index and 0 < choice.number <= len(branches):
        return choice.number, branches[choice.number - 1]
    number = branches.index(record.messages) + 1 if record.messages in branches else RETURNED
    return number, record.messages


def tabs(record: SampleRecord, shown: int) -> Sequence[Mapping[str, object]]:
    """Return the tabs of a sample with several branches: those around the shown one, the first and the
    last."""
    count = len(record.branches)
    if not count:
        return ()
    first = max(1, min(shown - TABS // 2, count - TABS + 1))
    numbers = {1, count, *range(first, min(count, first + TABS - 1) + 1)}
    if record.messages not in record.branches:
        numbers.add(RETURNED)
    return [
        {
            "name": f"Branch {number}" if number != RETURNED else "Returned",
            "place": f"{record.index}.{number}",
            "is_shown": number == shown,
        }
        for number in sorted(numbers)
    ]


def num_given(messages: Sequence[Message], prompt: Sequence[Message]) -> int:
    """Return how many messages at the beginning are those of the prompt."""
    same = 0
    while same < min(len(messages), len(prompt)) and messages[same] == prompt[same]:
        same += 1
    return same
