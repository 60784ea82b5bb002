"""Curves as the pages draw them: few points, however many there are, and SVG for browsers without
scripts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from producers.dashboard.formats import NOISE

Points = Sequence[tuple[int, float]]
"""(step, value) in order of step."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve as SVG: the points of a polyline, and the least and largest values."""

    points: str
    least: float
    largest: float


MOST_DOTS = 1000


@dataclass(frozen=True, slots=True)
class Scatter:
    """Points as SVG: a path of dots, and the least and largest values across and up."""

    path: str
    left: float
    right: float
    bottom: float
    top: float


def thin(points: Points, most: int) -> list[tuple[int, float]]:
    """At most `most` of the points. Of each stretch of steps the first, the least, the largest and the
    last one stay, so no peak disappears."""
    if len(points) <= most:
        return list(points)
    points = [point for point in points if not math.isnan(point[1])] or points
    stretches = max(1, most // 4)
    found: list[tuple[int, float]] = []
    for number in range(stretches):
        part = points[number * len(points) // stretches : (number + 1) * len(points) // stretches]
        extremes = {
            part[0],
            min(part, key=lambda point: point[1]),
            max(part, key=lambda point: point[1]),
            part[-1],
        }
        found.extend(sorted(extremes))
    return found


def finite_points(points: Points) -> list[tuple[int, float | None]]:
    """The same points, with None for NaN and infinity, which JSON cannot hold."""
    return [(step, value if math.isfinite(value) else None) for step, value in points]


def curve(points: Points, *, width: float, height: float) -> Curve | None:
    """The polyline of a curve in a box of this width and height; None without two finite values."""
    return curves([points], width=width, height=height)[0]


def curves(several: Sequence[Points], *, width: float, height: float) -> tuple[Curve | None, ...]:
    """The polylines of curves in common axes. A curve without two finite values is None."""
    drawn = [_draw(points) for points in several]
    steps = [step for points in drawn for step, _ in points]
    values = [value for points in drawn for _, value in points]
    if not steps:
        return (None,) * len(drawn)
    first, last, least, largest = min(steps), max(steps), min(values), max(values)
    across = width / max(1, last - first)

    def place(step: int, value: float) -> str:
        up = height * (1 - part_of(value, least, largest))
        return f"{(step - first) * across:.1f},{up:.1f}"

    return tuple(
        Curve(" ".join(place(*point) for point in points), least, largest) if points else None
        for points in drawn
    )


def whiskers(low: Curve | None, high: Curve | None) -> str:
    """A path with a line from each point of a curve to that of another one at the same step; empty
    without both."""
    if low is None or high is None:
        return ""
    pairs = zip(low.points.split(" "), high.points.split(" "), strict=True)
    return "".join(f"M{start}L{end}" for start, end in pairs)


def _draw(points: Points) -> Points:
    """The finite points of a curve, with 0 for noise; none if there are fewer than two."""
    finite = [(step, 0.0 if abs(value) < NOISE else value) for step, value in points]
    finite = [point for point in finite if math.isfinite(point[1])]
    return finite if len(finite) > 1 else []


def scatter(
    points: Sequence[tuple[float, float]], *, width: float, height: float
) -> Scatter | None:
    """Points in a box of this width and height, as a path with a dot for each; None without a finite
    one. Of many points some are drawn, evenly apart, and equal dots once."""
    finite = [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]
    if not finite:
        return None
    across, up = [x for x, _ in finite], [y for _, y in finite]
    (left, right), (bottom, top) = (min(across), max(across)), (min(up), max(up))
    dots = {
        f"M{width * part_of(x, left, right):.1f} {height * (1 - part_of(y, bottom, top)):.1f}h0"
        for x, y in finite[:: len(finite) // MOST_DOTS + 1]
    }
    return Scatter("".join(sorted(dots)), left, right, bottom, top)


def part_of(value: float, least: float, largest: float) -> float:
    """How far a value is on the way from the least to the largest one, from 0 to 1; in the middle if
    all are the same."""
    if largest <= least:
        return 0.5
    # Halves, because the difference of the largest floats is not finite.
    return (value / 2 - least / 2) / (largest / 2 - least / 2)
