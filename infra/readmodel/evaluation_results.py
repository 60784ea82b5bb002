"""The results of an evaluation by row and by attempt, and the rows in which two evaluations differ.

They are computed from its graded groups. A group of a retry takes the places of the attempts that it
repeated. An attempt that failed because of what the policy wrote counts with the reward 0 and does not
pass. One that failed otherwise is left out (`consumers/evaluation_figures.py` has the same rule).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from infra.readmodel.estimates import estimate_difference
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
    def is_failed(self) -> bool:
        """Whether it failed because of what the policy wrote."""
        return self.grade is not None and self.grade.is_failed

    @property
    def counted_reward(self) -> float | None:
        """The reward that counts; None if the attempt is left out."""
        return self.grade.counted_reward if self.grade else None

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
    def counted_rewards(self) -> list[float]:
        """The rewards that count."""
        rewards = (attempt.counted_reward for attempt in self.attempts)
        return [reward for reward in rewards if reward is not None]

    @property
    def passes(self) -> list[float]:
        """Whether each attempt that counts passes, as 1 or 0."""
        counted = (attempt for attempt in self.attempts if attempt.counted_reward is not None)
        rewards = (attempt.reward for attempt in counted)
        return [float(reward is not None and reward >= self.threshold) for reward in rewards]

    @property
    def num_passed(self) -> int:
        return int(sum(self.passes))

    @property
    def share(self) -> float | None:
        """The share of the attempts that pass, of those that count; None if no attempt counts."""
        return self.num_passed / len(self.counted_rewards) if self.counted_rewards else None

    @property
    def mean(self) -> float | None:
        return (
            sum(self.counted_rewards) / len(self.counted_rewards) if self.counted_rewards else None
        )

    def to_json(self) -> Mapping[str, object]:
        errors = (attempt.failure for attempt in self.attempts if attempt.reward is None)
        return {
            "row": self.row,
            "slot": self.slot,
            "attempts": len(self.attempts),
            "passed": self.num_passed,
            "failed": sum(attempt.is_failed for attempt in self.attempts),
            "left_out": len(self.attempts) - len(self.counted_rewards),
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


def num_left_out(results: Sequence[RowResult], *, num_rows: int, n: int) -> int:
    """How many of the attempts of an evaluation are left out, with those that were never made."""
    return num_rows * n - sum(len(result.counted_rewards) for result in results)


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


def find_caveats(
    names: Sequence[str],
    results: Sequence[Sequence[RowResult]],
    *,
    thresholds: Sequence[float],
    is_ended: Sequence[bool],
) -> list[str]:
    """Sentences about what a reader of a comparison of two evaluations has to know: one has not ended,
    they have other thresholds, or they have other rows."""
    a, b = names
    found = [
        f"{name} has not ended, so only its rows so far are compared"
        for name, ended in zip(names, is_ended, strict=True)
        if not ended
    ]
    if thresholds[0] != thresholds[1]:
        found.append(
            f"an attempt passes at {thresholds[0]:g} in {a} and at {thresholds[1]:g} in {b}; the paired "
            f"differences and the rows use {thresholds[0]:g} for both"
        )
    rows = [{row.row for row in each if row.counted_rewards} for each in results]
    if rows[0] != rows[1]:
        shared = len(rows[0] & rows[1])
        found.append(
            f"the figures are of {len(rows[0])} rows in {a} and {len(rows[1])} in {b}, and {shared} of "
            "these are the same; "
            + ("compare the paired differences" if shared else "nothing can be compared")
        )
    return found


def paired_differences(
    first: Sequence[RowResult], second: Sequence[RowResult]
) -> list[Mapping[str, object]]:
    """By how much the mean reward and the pass rate of the second evaluation are higher, over the rows
    that both have, with standard error and 95 % interval."""
    a, b = ({result.row: result for result in results} for results in (first, second))
    both = [(a[row], b[row]) for row in sorted(a.keys() & b.keys())]
    found = {
        "reward": estimate_difference(
            [x.counted_rewards for x, _ in both], [y.counted_rewards for _, y in both]
        ),
        "pass_rate": estimate_difference([x.passes for x, _ in both], [y.passes for _, y in both]),
    }
    return [
        {
            "key": f"eval/{name}",
            "difference": one.mean,
            "se": one.se,
            "interval": None if one.low is None else [one.low, one.high],
            "rows": one.num_rows,
        }
        for name, one in found.items()
        if one is not None
    ]


def _change(first: RowResult | None, second: RowResult | None) -> Change:
    before = first.share if first else None
    after = second.share if second else None
    if before is None or after is None:
        return "missing"
    if before == after:
        return "same"
    return "gained" if after > before else "lost"
