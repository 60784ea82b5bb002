"""How long the answers of a run are, and what rewards they get: whether it learns to write more."""

from collections.abc import Sequence
from dataclasses import dataclass

from infra.spine.ports.event_log import EventStore
from schemas.events import GroupGraded
from schemas.ids import grade_stream

MOST_GROUPS = 80
"""Groups whose answers are counted, evenly among those that are given."""

BINS = 8

Point = tuple[int, float]
"""The tokens of an answer, and its reward."""


@dataclass(frozen=True, slots=True)
class LengthBin:
    """The answers of `first` to `last` tokens, with their rewards. Without answers there are none."""

    first: int
    last: int
    samples: int
    mean: float | None
    least: float | None
    largest: float | None


@dataclass(frozen=True, slots=True)
class Lengths:
    """The answers of some groups, one by one and by length."""

    groups: int
    points: tuple[Point, ...]
    bins: tuple[LengthBin, ...]


async def read_lengths(log: EventStore, groups: Sequence[str]) -> Lengths:
    """The lengths and rewards of the answers of some of these groups. Groups whose events are no longer
    in the log are left out."""
    count = min(len(groups), MOST_GROUPS)
    chosen = [groups[number * len(groups) // count] for number in range(count)]
    streams = await log.load({grade_stream(group): 0 for group in chosen})
    graded = [
        recorded.event
        for events in streams.values()
        for recorded in events
        if isinstance(recorded.event, GroupGraded)
    ]
    points = tuple(point for event in graded for point in points_of(event))
    return Lengths(len(graded), points, length_bins(points))


def points_of(event: GroupGraded) -> list[Point]:
    """The answers of a group that have a reward."""
    tokens = {entry.index: entry.completion_tokens for entry in event.entries}
    return [
        (tokens[grade.index], grade.reward)
        for grade in event.grades
        if grade.reward is not None and grade.index in tokens
    ]


def length_bins(points: Sequence[Point]) -> tuple[LengthBin, ...]:
    """At most eight bins of equal width, from the shortest answer to the longest."""
    if not points:
        return ()
    shortest = min(length for length, _ in points)
    width = (max(length for length, _ in points) - shortest) // BINS + 1
    held: dict[int, list[float]] = {}
    for length, reward in points:
        held.setdefault((length - shortest) // width, []).append(reward)
    return tuple(
        _bin(shortest + number * width, width, held.get(number, []))
        for number in range(max(held) + 1)
    )


def _bin(first: int, width: int, rewards: Sequence[float]) -> LengthBin:
    return LengthBin(
        first=first,
        last=first + width - 1,
        samples=len(rewards),
        mean=sum(rewards) / len(rewards) if rewards else None,
        least=min(rewards, default=None),
        largest=max(rewards, default=None),
    )
