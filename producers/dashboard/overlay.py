"""Several curves in one chart with common axes, or their mean with a band around it, as SVG."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from producers.dashboard.charts import Points, part_of

WIDTH, HEIGHT = 600.0, 150.0


def overlay(curves: Sequence[Points]) -> list[str]:
    """The points of a polyline for each curve; empty for one without two finite values."""
    finite = [[(s, v) for s, v in points if math.isfinite(v)] for points in curves]
    everything = [point for points in finite for point in points]
    if not everything:
        return ["" for _ in curves]
    first, last = min(s for s, _ in everything), max(s for s, _ in everything)
    least, largest = min(v for _, v in everything), max(v for _, v in everything)
    across = WIDTH / max(1, last - first)
    return [
        " ".join(
            f"{(step - first) * across:.1f},{HEIGHT * (1 - part_of(value, least, largest)):.1f}"
            for step, value in points
        )
        if len(points) > 1
        else ""
        for points in finite
    ]


@dataclass(frozen=True, slots=True)
class MeanPoint:
    """The mean of the runs that have a value at a step, their standard deviation, which is 0 for a
    single run, and how many they are."""

    step: int
    mean: float
    deviation: float
    num_runs: int


@dataclass(frozen=True, slots=True)
class Band:
    """A mean as the points of a polyline, and the band of one standard deviation to each side as those
    of a polygon, with the least and the largest value of the band."""

    line: str
    area: str
    least: float
    largest: float


def mean_points(values: Mapping[int, Sequence[float]]) -> list[MeanPoint]:
    """The mean of the finite values at each step, in order of step."""
    found = []
    for step, at_step in sorted(values.items()):
        finite = [value for value in at_step if math.isfinite(value)]
        if finite:
            deviation = statistics.stdev(finite) if len(finite) > 1 else 0.0
            found.append(MeanPoint(step, statistics.fmean(finite), deviation, len(finite)))
    return found


def band(points: Sequence[MeanPoint]) -> Band | None:
    """The drawing of a mean and its band; None without two points."""
    if len(points) < 2:
        return None
    lows = [(one.step, one.mean - one.deviation) for one in points]
    highs = [(one.step, one.mean + one.deviation) for one in points]
    low, line, high = overlay([lows, [(one.step, one.mean) for one in points], highs])
    back = " ".join(reversed(high.split(" ")))
    return Band(
        line,
        f"{low} {back}",
        min(value for _, value in lows),
        max(value for _, value in highs),
    )
