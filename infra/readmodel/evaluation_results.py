"""The results of an evaluation by row and by attempt, and the rows in which two evaluations differ.

They are computed from its graded groups. A group of a retry takes the places of the attempts that it
repeated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from infra.readmodel.registry import EvaluationGroup
from schemas.sampling import Grade

GRADES = TypeAdapter(tuple[Grade, ...])
ATTEMPTS = TypeAdapter(tuple[int, ...])

Change = Literal["gained", "lost", "same", "missing"]
"""Whether a larger or smaller share of a row's attempts passes. `missing`: one evaluation has no result
of the row."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """An attempt at a row: its number, the group that holds it, and its index and its grade there."""

    number: int
    group: EvaluationGroup
    index: int
    grade: Grade | None

    @property
    def reward(self) -> float | None:
        return self.grade.reward if self.grade else None

    @property
    def failure(self) -> str | None:
        """Why it has no reward, if a grade says it."""
        failure = self.grade.failure if self.grade else None
        return f"{failure.category}: {failure.message}" if failure else None


@dataclass(frozen=True, slots=True)
class RowResult:
    """The attempts at a dataset row, in order. One passes with a reward of at least `threshold`."""

    row: int
    slot: int
    attempts: tuple[AttemptResult, ...]
    threshold: float

    @property
    def rewards(self) -> list[float]:
        return [attempt.reward for attempt in self.attempts if attempt.reward is not None]

    @property
    def num_passed(self) -> int:
        return sum(reward >= self.threshold for reward in self.rewards)

    @property
    def share(self) -> float | None:
        """The share of the graded attempts that pass; None if no attempt is graded."""
        return self.num_passed / len(self.rewards) if self.rewards else None

    @property
    def mean(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    def to_json(self) -> Mapping[str, object]:
        errors = (attempt.failure for attempt in self.attempts if attempt.reward is None)
        return {
            "row": self.row,
            "slot": self.slot,
            "attempts": len(self.attempts),
            "passed": self.num_passed,
            "failed": len(self.attempts) - len(self.rewards),
            "reward": self.mean,
            "rewards": [attempt.reward for attempt in self.attempts],
            "error": next((error for error in errors if error), None),
        }


def results_by_row(groups: Sequence[EvaluationGroup], *, threshold: float) -> list[RowResult]:
    """The results of an evaluation, in the order of its rows. `groups` are in the order of slot and
    replacement."""
    found: dict[int, dict[int, AttemptResult]] = {}
    rows: dict[int, int] = {}
    for group in groups:
        grades = GRADES.validate_json(group.grades)
        numbers = ATTEMPTS.validate_json(group.attempts) if group.attempts else range(len(grades))
        place = found.setdefault(group.slot, {})
        rows[group.slot] = group.dataset_row
        for number, grade in zip(numbers, grades, strict=False):
            place[number] = AttemptResult(number, group, grade.index, grade)
    return [
        RowResult(rows[slot], slot, tuple(place[n] for n in sorted(place)), threshold)
        for slot, place in sorted(found.items())
    ]


def select_attempts(
    results: Sequence[RowResult],
    *,
    row: int | None = None,
    only_failed: bool = False,
    only_not_passed: bool = False,
) -> list[AttemptResult]:
    """The attempts at one row or at all rows: all of them, those without a reward, or those that have
    no reward or do not pass."""
    return [
        attempt
        for result in results
        if row is None or result.row == row
        for attempt in result.attempts
        if not only_failed or attempt.reward is None
        if not only_not_passed or attempt.reward is None or attempt.reward < result.threshold
    ]


def num_without_reward(results: Sequence[RowResult], *, num_rows: int, n: int) -> int:
    """How many of the attempts of an evaluation have no reward, with those that were never made."""
    return num_rows * n - sum(len(result.rewards) for result in results)


def compare_rows(
    first: Sequence[RowResult], second: Sequence[RowResult]
) -> Iterator[Mapping[str, object]]:
    """Each row of two evaluations, with how the second differs from the first."""
    a, b = ({result.row: result for result in results} for results in (first, second))
    for row in sorted(a.keys() | b.keys()):
        both = (a.get(row), b.get(row))
        yield {
            "row": row,
            "change": _change(*both),
            "passed": [result.num_passed if result else None for result in both],
            "attempts": [len(result.attempts) if result else None for result in both],
            "reward": [result.mean if result else None for result in both],
        }


def _change(first: RowResult | None, second: RowResult | None) -> Change:
    before = first.share if first else None
    after = second.share if second else None
    if before is None or after is None:
        return "missing"
    if before == after:
        return "same"
    return "gained" if after > before else "lost"
